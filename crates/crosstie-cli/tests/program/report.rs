//! `crosstie report`: the page, exit statuses and error texts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const RESULT: &str = r#"{
    "bench": "kv", "device": "software", "backend": "BACKEND", "ops": 3000, "seconds": 0.003, "ops_per_s": 1e6,
    "p50_ns": 900, "p99_ns": 1100, "p999_ns": 1200, "max_ns": 1300, "latency": [[900, 2900], [1300, 100]],
    "errors": 0, "node_gone": 0, "interrupted": false, "nodes": 2, "daemons": 1, "clients": 1, "processes": false,
    "queue_depth": 1, "loop": "closed", "read_ratio": 0.5, "keys": 1000, "zipf": 0, "value_bytes": 8, "seed": 1,
    "launcher": "local", "counters": {"batches": 10}
}"#;

/// A temporary directory that is removed at the end of the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("crosstie-report-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        Directory(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}

fn report(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_crosstie"));
    command.arg("report").args(arguments).output().expect("the program starts")
}

/// Checks that the command exits with `status` and one line on standard error. Returns that line.
fn refused(arguments: &[&str], status: i32) -> String {
    let output = report(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn several_files_make_one_page() {
    let directory = Directory::new("several");
    let one = directory.file("one.json", &RESULT.replace("BACKEND", "meta"));
    let more = directory.file("more.json", &format!("[{}]", RESULT.replace("BACKEND", "delegation")));
    let page = directory.0.join("page.html").display().to_string();
    let output = report(&[&one, &more, "-o", &page]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains(
            "Delegation / Meta, 2 nodes, 1 daemon, 1 client, depth 1: no difference seen (ratio 1.00)"
        ),
        "{text}"
    );
    assert!(text.contains(&page), "{text}");
    let html = fs::read_to_string(&page).expect("the page");
    assert!(html.starts_with("<!DOCTYPE html>") && html.ends_with("</html>\n"));
}

#[test]
fn invalid_command_line_exits_with_status_2() {
    assert!(refused(&["-o", "page.html"], 2).contains("FILE.json"));
    assert!(refused(&["one.json"], 2).contains("--output"));
    refused(&["one.json", "-o", "page.html", "--colour"], 2);
}

#[test]
fn unreadable_or_unwritable_file_is_named_with_status_1() {
    let directory = Directory::new("refused");
    let page = directory.0.join("page.html").display().to_string();
    let good = directory.file("good.json", &RESULT.replace("BACKEND", "meta"));
    let text = refused(&["/no/such/file.json", "-o", &page], 1);
    assert!(text.contains("/no/such/file.json"), "{text}");
    let wrong = directory.file("wrong.json", &RESULT.replace("BACKEND", "meta").replace("3000", "-3"));
    let text = refused(&[&good, &wrong, "-o", &page], 1);
    assert!(text.contains("wrong.json: ops: "), "{text}");
    let none = directory.file("none.json", "");
    assert!(refused(&[&none, "-o", &page], 1).contains("none.json"));
    assert!(!PathBuf::from(&page).exists(), "a page was written although a file is invalid");
    let text = refused(&[&good, "-o", "/no/such/directory/page.html"], 1);
    assert!(text.contains("/no/such/directory/page.html"), "{text}");
}

/// Runs `script` in `sh`, with the program as `$0` and the arguments as `$@`.
fn report_in_shell(script: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_crosstie"), "report"]).args(arguments);
    command.output().expect("sh runs")
}

fn file_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("the directory").map(|entry| entry.expect("an entry"));
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().display().to_string()).collect();
    names.sort();
    names
}

#[test]
fn page_that_cannot_be_written_completely_leaves_the_former_page() {
    let directory = Directory::new("partial");
    let figures = directory.file("figures.json", &RESULT.replace("BACKEND", "meta"));
    let page = directory.0.join("page.html");
    let shown = page.display().to_string();
    // A page is longer than one block. With the signal ignored, writing more is an error.
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
    for before in [None, Some("the former page")] {
        if let Some(text) = before {
            fs::write(&page, text).expect("the former page");
        }
        let output = report_in_shell(script, &[&figures, "-o", &shown]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(&format!("{shown}: File too large")), "{error}");
        assert_eq!(fs::read_to_string(&page).ok().as_deref(), before);
        let names = if before.is_some() { &["figures.json", "page.html"][..] } else { &["figures.json"] };
        assert_eq!(file_names(&directory.0), names);
    }
}

#[test]
fn full_file_system_leaves_no_part_of_a_page() {
    let directory = Directory::new("full");
    let figures = directory.file("figures.json", &RESULT.replace("BACKEND", "meta"));
    let mounted = directory.0.join("mounted");
    fs::create_dir(&mounted).expect("a directory");
    let (shown, listing) = (mounted.join("page.html"), directory.0.join("listing"));
    let [shown, mounted, listing] = [&shown, &mounted, &listing].map(|path| path.display().to_string());
    let mount = format!("mount -t tmpfs -o size=8k none {mounted}");
    let is_able = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).output();
    if !is_able.is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: this user may not mount a file system");
    }
    let script =
        format!("{mount} && {{ \"$0\" \"$@\"; status=$?; ls -A {mounted} > {listing}; exit $status; }}");
    let script = format!("exec unshare -rm sh -c '{script}' \"$0\" \"$@\"");
    let output = report_in_shell(&script, &[&figures, "-o", &shown]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains(&format!("{shown}: No space left on device")), "{error}");
    assert_eq!(fs::read_to_string(&listing).expect("a listing"), "");
}

#[test]
fn page_can_be_written_to_a_device_or_through_a_link() {
    let directory = Directory::new("device");
    let figures = directory.file("figures.json", &RESULT.replace("BACKEND", "meta"));
    assert!(report(&[&figures, "-o", "/dev/null"]).status.success());
    assert!(!fs::metadata("/dev/null").expect("still there").is_file());
    assert!(refused(&[&figures, "-o", "/dev/full"], 1).contains("/dev/full: No space left on device"));
    let (page, link) = (directory.0.join("page.html"), directory.0.join("link.html"));
    std::os::unix::fs::symlink("page.html", &link).expect("a link");
    for _ in 0..2 {
        assert!(report(&[&figures, "-o", link.to_str().expect("UTF-8")]).status.success());
        assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
        assert!(fs::read_to_string(&page).expect("the page").ends_with("</html>\n"));
        fs::write(&page, "the former page").expect("the page");
    }
}

#[test]
fn report_does_not_overwrite_its_input() {
    let directory = Directory::new("itself");
    let text = RESULT.replace("BACKEND", "meta");
    let figures = directory.file("figures.json", &text);
    let other_name = format!("{}/./figures.json", directory.0.display());
    assert!(refused(&[&figures, "-o", &other_name], 2).contains("another name"));
    assert_eq!(fs::read_to_string(&figures).expect("still there"), text);
}

#[test]
fn legend_has_only_measured_backends() {
    let directory = Directory::new("legend");
    let figures = directory.file("one.json", &RESULT.replace("BACKEND", "delegation"));
    let page = directory.0.join("page.html").display().to_string();
    assert!(report(&[&figures, "-o", &page]).status.success());
    let html = fs::read_to_string(&page).expect("the page");
    let legend = html.split("class=\"legend\">").nth(1).and_then(|rest| rest.split("</div>").next());
    let legend = legend.expect("a legend");
    assert!(legend.contains("Delegation") && !legend.contains("Meta"), "{legend}");
}
