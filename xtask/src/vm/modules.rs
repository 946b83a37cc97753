//! The order in which kernel modules must be loaded.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

/// The dependencies between the modules of one kernel (`modules.dep`, written by `depmod`), and the built-in modules.
pub(super) struct Dependencies {
    /// By module name: its path and the paths of its dependencies.
    modules: BTreeMap<String, (String, Vec<String>)>,
    built_in: BTreeSet<String>,
}

impl Dependencies {
    /// Parses `modules.dep` and `modules.builtin`.
    pub(super) fn parse(dep: &str, builtin: &str) -> Self {
        let mut modules = BTreeMap::new();
        for (path, needs) in dep.lines().filter_map(|line| line.split_once(':')) {
            let needs = needs.split_whitespace().map(str::to_owned).collect();
            modules.insert(module_name(path), (path.to_owned(), needs));
        }
        Dependencies { modules, built_in: builtin.lines().map(module_name).collect() }
    }

    /// Returns the paths of the named modules and their dependencies, each once, in loading order; or the name of a module
    /// that this kernel does not have.
    pub(super) fn load_order<'a>(&self, wanted: &[&'a str]) -> Result<Vec<String>, &'a str> {
        let mut order: Vec<String> = Vec::new();
        for &module in wanted {
            if self.built_in.contains(&module_name(module)) {
                continue;
            }
            let (path, needs) = self.modules.get(&module_name(module)).ok_or(module)?;
            // depmod lists all dependencies of a module; one that must be loaded earlier comes later in the list.
            for path in needs.iter().rev().chain([path]) {
                if !order.contains(path) {
                    order.push(path.clone());
                }
            }
        }
        Ok(order)
    }
}

/// Returns a module's name: the file name without suffixes, with `_` for `-`.
fn module_name(path: &str) -> String {
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
    fn dependencies_are_loaded_before_a_module_and_only_once() {
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
    fn dash_and_underscore_are_equal_and_missing_module_is_named() {
        let dependencies = Dependencies::parse(DEP, "");
        assert_eq!(dependencies.load_order(&["ip6_udp_tunnel"]).unwrap().len(), 2);
        assert_eq!(dependencies.load_order(&["siw"]), Err("siw"));
    }
}
