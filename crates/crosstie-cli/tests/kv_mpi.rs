//! `crosstie bench kv` under mpirun. Needs OpenMPI's mpirun: `apt-get install openmpi-bin libopenmpi-dev libclang-dev`.

use std::process::Command;

use crosstie_bench::figures;

#[test]
fn each_rank_of_mpirun_is_a_node() {
    for backend in ["meta", "delegation", "meta,delegation"] {
        let output = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "--timeout", "60", "-n", "2"])
            .arg(env!("CARGO_BIN_EXE_crosstie"))
            .args(["bench", "kv", "--json", "--duration", "0.3", "--runs", "2", "--keys", "2000"])
            .args(["--clients", "2", "--backend", backend])
            .output()
            .unwrap_or_else(|error| panic!("mpirun does not start ({error}): apt-get install openmpi-bin"));
        assert!(output.status.success(), "{output:?}");
        let found = figures::parse(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        assert_eq!(found.len(), backend.split(',').count());
        for figures in found {
            assert_eq!((figures.nodes, figures.launcher.as_str(), figures.errors), (2, "mpi", 0));
            assert!(figures.counters["calls"] > 0 && figures.per_rank.len() == 2, "{figures:?}");
        }
    }
}
