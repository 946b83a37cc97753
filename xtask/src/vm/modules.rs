//! Kernel modules and the order in which they load.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

/// The module dependencies of one kernel: what `depmod` wrote to `modules.dep`, and what is built in.
pub(super) struct Dependencies {
    /// Name to path and the paths it needs.
    modules: BTreeMap<String, (String, Vec<String>)>,
    built_in: BTreeSet<String>,
}

impl Dependencies {
    /// Parses `modules.dep` and `modules.builtin`.
    pub(super) fn parse(dep: &str, builtin: &str) -> Self {
        let mut modules = BTreeMap::new();
        for (path, needs) in dep.lines().filter_map(|line| line.split_once(':')) {
            let needs = needs.split_whitespace().map(str::to_owned).collect();
            modules.insert(name(path), (path.to_owned(), needs));
        }
        Dependencies { modules, built_in: builtin.lines().map(name).collect() }
    }

    /// The paths of the named modules and all that they need, each once, in an order that loads; or the name
    /// of a module that this kernel does not have.
    pub(super) fn load_order<'a>(&self, wanted: &[&'a str]) -> Result<Vec<String>, &'a str> {
        let mut order: Vec<String> = Vec::new();
        for &module in wanted {
            if self.built_in.contains(&name(module)) {
                continue;
            }
            let (path, needs) = self.modules.get(&name(module)).ok_or(module)?;
            // depmod lists all that a module needs, the deepest last.
            for path in needs.iter().rev().chain([path]) {
                if !order.contains(path) {
                    order.push(path.clone());
                }
            }
        }
        Ok(order)
    }
}

/// A module's name: the file's, without its suffixes, `-` and `_` being one.
fn name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/core/ib_core.ko:
kernel/core/ib_uverbs.ko: kernel/core/ib_core.ko
kernel/net/udp_tunnel.ko.xz:
kernel/net/ip6-udp-tunnel.ko: kernel/net/udp_tunnel.ko.xz
kernel/rxe/rdma_rxe.ko: kernel/core/ib_uverbs.ko kernel/core/ib_core.ko kernel/net/ip6-udp-tunnel.ko kernel/net/udp_tunnel.ko.xz
";

    #[test]
    fn what_a_module_needs_comes_before_it_and_only_once() {
        let dependencies = Dependencies::parse(DEP, "kernel/net/ipv6/ipv6.ko\n");
        let order = dependencies.load_order(&["ib_uverbs", "ipv6", "rdma_rxe"]).unwrap();
        assert_eq!(
            order,
            [
                "kernel/core/ib_core.ko",
                "kernel/core/ib_uverbs.ko",
                "kernel/net/udp_tunnel.ko.xz",
                "kernel/net/ip6-udp-tunnel.ko",
                "kernel/rxe/rdma_rxe.ko",
            ]
        );
    }

    #[test]
    fn names_match_with_dash_and_underscore_and_strangers_are_named() {
        let dependencies = Dependencies::parse(DEP, "");
        assert_eq!(dependencies.load_order(&["ip6_udp_tunnel"]).unwrap().len(), 2);
        assert_eq!(dependencies.load_order(&["siw"]), Err("siw"));
    }
}
