//! The page docs/guide/troubleshooting.md quotes error texts. Each of them must be a text of the sources.

use std::fs;
use std::path::Path;

/// Texts that are not in the sources: those of the operating system and of the standard library.
const EXTERNAL_TEXTS: [&str; 3] =
    ["Connection refused", "Too many open files (os error 24)", "Cannot allocate memory (os error 12)"];

#[test]
fn quoted_error_texts_exist_in_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut sources = String::new();
    for entry in fs::read_dir(root.join("crates")).expect("the crates are there") {
        read_sources(&entry.expect("an entry").path().join("src"), &mut sources);
    }
    let sources = without_continuations(&sources);
    let page = fs::read_to_string(root.join("docs/guide/troubleshooting.md")).expect("the page is there");
    let quotes =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |")).map(|(text, _)| text);
    let (mut count, mut missing) = (0, Vec::new());
    for quote in quotes.filter(|quote| !EXTERNAL_TEXTS.contains(quote)) {
        count += 1;
        if !parts(quote).iter().all(|part| sources.contains(part)) {
            missing.push(quote);
        }
    }
    assert!(count > 40, "only {count} quotes were found: has the page another form?");
    assert!(
        missing.is_empty(),
        "these error texts do not exist (any more), correct the page:\n{}",
        missing.join("\n")
    );
}

/// The fixed parts of a text. An ellipsis or the name of a variable stands for something else; a cause follows a colon.
fn parts(quote: &str) -> Vec<String> {
    let words = quote.split(' ').map(|word| if word.starts_with("CROSSTIE_") { "…" } else { word });
    let text = words.collect::<Vec<_>>().join(" ").replace(": ", "…");
    text.split('…').map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

fn read_sources(folder: &Path, sources: &mut String) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            read_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&fs::read_to_string(&path).expect("a source file"));
        }
    }
}

/// A backslash at the end of a line of a string literal drops the line end and the indentation that follows.
fn without_continuations(text: &str) -> String {
    let mut lines = text.split("\\\n");
    let mut joined = lines.next().unwrap_or_default().to_owned();
    lines.for_each(|line| joined.push_str(line.trim_start()));
    joined.replace("\\\"", "\"")
}
