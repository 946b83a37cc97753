//! The client program in the README cannot be compiled where the README is (the crate `crosstie`). It is compiled as part of the
//! guide; here is checked that both are the same.

#[test]
fn client_program_of_readme_is_the_one_of_the_guide() {
    let readme = include_str!("../../../../README.md");
    let guide = include_str!("../../../../docs/guide/store.md");
    let (_, program) = readme.split_once("```rs\n").expect("the README has a block that it does not compile");
    let (program, rest) = program.split_once("```\n").expect("the block ends");
    assert!(!rest.contains("```rs\n"), "one such block is enough");
    assert!(program.contains("Client::attach"), "{program}");
    let compiled = format!("```rust,no_run\n{program}```\n");
    assert!(guide.contains(&compiled), "docs/guide/store.md has another program than the README:\n{program}");
}
