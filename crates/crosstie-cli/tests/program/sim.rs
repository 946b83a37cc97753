//! `crosstie sim`: table, JSON, exit statuses, replay.

use std::process::{Command, Output};

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_crosstie")).arg("sim").args(arguments).output().expect("crosstie runs")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn all_scenarios_pass_and_are_listed() {
    let output = sim(&["--members", "6", "--operations", "10", "--seeds", "2"]);
    assert!(output.status.success(), "{output:?}");
    for scenario in ["lock", "barrier", "message", "credits", "rails"] {
        let row = text(&output).lines().find(|line| line.starts_with(scenario)).map(str::to_string);
        assert!(row.is_some_and(|row| row.ends_with("passed")), "{scenario}: {}", text(&output));
    }
}

#[test]
fn json_of_a_seed_repeats_itself() {
    let arguments =
        ["lock", "--members", "9", "--deaths", "2", "--restless", "--seed", "17", "--seeds", "1", "--json"];
    let (first, second) = (sim(&arguments), sim(&arguments));
    assert!(first.status.success(), "{first:?}");
    assert_eq!(text(&first), text(&second));
    let result: serde_json::Value = serde_json::from_str(&text(&first)).unwrap();
    assert_eq!(result["failed_runs"], 0);
    assert_eq!(result["sim"][0]["seed"], 17);
    assert!(result["sim"][0]["packets"]["lock_heal"].as_u64().unwrap() > 0, "the deaths have no effect");
}

#[test]
fn values_outside_of_their_limits_are_usage_errors() {
    for arguments in [
        &["--members", "1"][..],
        &["--members", "1025"],
        &["--seeds", "0"],
        &["--seed", "18446744073709551615", "--seeds", "2"],
        &["--latency-ns", "0"],
        &["message", "--loss", "0.9"],
        &["credits", "--deaths", "1"],
        &["rails", "--partition"],
        &["barrier", "--partition", "--members", "2"],
    ] {
        let output = sim(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{output:?}");
    }
}
