//! The program `crosstie`.
fn main() {}
