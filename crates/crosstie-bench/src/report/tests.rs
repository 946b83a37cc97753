//! Parses the page as XML and checks its elements, for usual and for extreme results.

use std::collections::{BTreeMap, BTreeSet};

use crate::figures::{BENCH, Figures, LoopKind, Rank, Run};
use crosstie_kv::Backend;
use roxmltree::{Document, ParsingOptions};

use super::compare::Comparison;
use super::{page::page, table, write};
use crate::median::median;

fn result(backend: Backend, nodes: u32, rates: &[f64]) -> Figures {
    let run = |rate: &f64| Run { ops: *rate as u64, seconds: 1.0, ops_per_s: *rate };
    Figures {
        bench: BENCH.into(),
        device: "software".into(),
        backend,
        ops: rates.iter().sum::<f64>() as u64,
        seconds: rates.len() as f64,
        ops_per_s: median(rates.iter().copied()).unwrap_or(0.0),
        runs: rates.iter().map(run).collect(),
        p50_ns: 900,
        p99_ns: 2000,
        p999_ns: 5000,
        max_ns: 70_000,
        latency: vec![[800, 10], [900, 40], [2000, 49], [70_000, 1]],
        batches: if nodes > 1 { vec![[1, 5], [2, 7], [64, 1]] } else { vec![] },
        errors: 0,
        node_gone: 0,
        interrupted: false,
        counters: BTreeMap::from([("batches".into(), 10), ("batched".into(), 45)]),
        per_rank: vec![Rank {
            rank: 0,
            ops_per_s: 1.0,
            errors: 0,
            memory_bytes: 5 << 20,
            memory_bound_bytes: Some(6 << 20),
        }],
        nodes,
        daemons: 2,
        clients: 4,
        client_threads: Some(4),
        processes: false,
        queue_depth: 4,
        loop_kind: LoopKind::Closed,
        rate: None,
        read_ratio: 0.5,
        keys: 1000,
        zipf: 0.0,
        value_bytes: 8,
        local_share: None,
        seed: 1,
        launcher: "local".into(),
        cores: "0-3".into(),
        machine: "a machine".into(),
        limit_ns: Some(180.0),
        limit_ops_per_s: None,
        ratio_to_limit: None,
    }
}

fn pair(nodes: u32) -> [Figures; 2] {
    [
        result(Backend::Delegation, nodes, &[1.5e6, 1.4e6, 1.6e6]),
        result(Backend::Meta, nodes, &[1e6, 1e6, 0.8e6]),
    ]
}

/// Parses the page and checks every element. Returns the names of all elements.
fn check_page(html: &str) -> BTreeSet<String> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    let document =
        Document::parse_with_options(html, options).unwrap_or_else(|error| panic!("{error}\n{html}"));
    let (mut ids, mut used) = (BTreeSet::new(), Vec::new());
    let mut names = BTreeSet::new();
    for element in document.descendants().filter(roxmltree::Node::is_element) {
        names.insert(element.tag_name().name().to_owned());
        for attribute in element.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(!["src", "href", "style"].contains(&name) && !name.starts_with("on"), "{name}={value}");
            match name {
                "id" => assert!(ids.insert(value), "two elements have the id {value}"),
                "aria-labelledby" => used.extend(value.split(' ')),
                "x" | "y" | "x1" | "x2" | "y1" | "y2" | "cx" | "cy" | "r" | "width" | "height" => {
                    let number: f64 = value.trim_end_matches('%').parse().unwrap_or(f64::NAN);
                    assert!((-1.0..2000.0).contains(&number), "{name}={value} of {:?}", element.tag_name());
                }
                "d" => assert!(!value.contains("NaN") && !value.contains("inf"), "{value}"),
                _ => {}
            }
        }
        if element.has_tag_name("svg") && element.attribute("role") == Some("img") {
            let label = element.attribute("aria-label").or(element.attribute("aria-labelledby"));
            assert!(label.is_some_and(|label| !label.is_empty()), "a plot without a label");
        }
    }
    assert!(used.iter().all(|id| ids.contains(id)), "{used:?} are not all among {ids:?}");
    for word in ["http:", "https:", "url(", "@import", "NaN", "inf "] {
        assert!(!html.contains(word), "{word} is on the page");
    }
    names
}

fn heads(html: &str) -> Vec<&str> {
    html.split("<h2>").skip(1).filter_map(|rest| rest.split("</h2>").next()).collect()
}

#[test]
fn page_has_a_section_for_all_data_in_the_results() {
    let two = pair(2);
    let html = page(&two);
    check_page(&html);
    assert_eq!(html, page(&two), "the same figures make the same bytes");
    assert!(html.contains("<h1>Delegation makes 1.50 times the operations of Meta</h1>"));
    assert!(html.contains("run by run: 1.50, 1.40, 2.00"), "{html}");
    assert_eq!(heads(&html), ["Throughput", "Latency", "Batch size", "Configuration", "Every result"]);
    assert_eq!(html.matches("class=\"line delegation\"").count(), 1);
    assert_eq!(html.matches("<circle class=\"run\"").count(), 6);

    let sweep = [pair(1), pair(2), pair(8)].concat();
    let html = page(&sweep);
    check_page(&html);
    assert!(heads(&html).contains(&"Scaling"));
    assert!(html.contains("By nodes"));
    assert!(!html.contains("By queue depth"), "the depth does not vary");

    let html = page(&pair(1));
    check_page(&html);
    assert!(!heads(&html).contains(&"Batch size"), "nothing went to another node");
}

#[test]
fn backends_are_compared_only_if_all_parameters_are_equal() {
    let mut other = pair(2);
    other[0].queue_depth = 1;
    let comparison = Comparison::new(&other);
    assert_eq!(comparison.groups.len(), 2);
    assert!(comparison.groups.iter().all(|group| group.ratio().is_none()));
    let sweep = [pair(1), pair(2)].concat();
    let comparison = Comparison::new(&sweep);
    let labels: Vec<&str> = comparison.groups.iter().map(|group| group.label.as_str()).collect();
    assert_eq!(labels, ["1 node", "2 nodes"]);
    let ratio = comparison.groups[0].ratio().expect("both backends");
    assert_eq!((ratio.ratio, ratio.by_run), (1.5, vec![1.5, 1.4, 2.0]));
}

#[test]
fn errors_and_interruptions_are_warnings() {
    let mut two = pair(2);
    two[0].errors = 7;
    two[1].node_gone = 11;
    two[1].interrupted = true;
    two[0].runs[0].ops_per_s = 9e6;
    let (html, text) = (page(&two), table(&two));
    check_page(&html);
    for words in
        ["7 of 4500000 operations got", "11 of 2800000 operations ended", "interrupted", "6.43 times"]
    {
        assert!(html.contains(words) && text.contains(words), "{words}: {text}");
    }
    assert_eq!(html.matches("<li class=\"severe\">").count(), 3);
    assert!(!page(&pair(2)).contains("<ul class=\"warnings\""));
}

#[test]
fn overload_unused_keys_and_backends_that_do_not_differ_are_warnings() {
    let mut two = pair(2);
    for figures in &mut two {
        (figures.loop_kind, figures.rate) = (LoopKind::Open, Some(3e6));
        figures.counters.insert("not_started".into(), 4711);
        figures.counters.insert("keys_used".into(), figures.keys / 2);
        figures.value_bytes = 100;
    }
    let text = table(&two);
    for words in ["overloaded", "4711 operations had not started", "of the", "compares nothing"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    two.iter_mut().for_each(|figures| figures.rate = Some(1e6));
    assert!(!table(&two).contains("overloaded"));
    let text = table(&pair(2));
    assert!(!text.contains("warning"), "{text}");
    assert!(text.contains("the same code in successive runs: Meta / Meta"), "{text}");
}

#[test]
fn texts_of_results_are_escaped() {
    let plain = check_page(&page(&[pair(1), pair(2)].concat()));
    let nasty =
        "</style></title><script>alert(1)</script><img src=x onerror='a'>\"&]]>--><!--\0\u{1b}[2J\u{202e}";
    let mut two = pair(2);
    for figures in &mut two {
        for text in [&mut figures.device, &mut figures.launcher, &mut figures.cores, &mut figures.machine] {
            *text = nasty.into();
        }
        figures.counters.insert(nasty.into(), 1);
    }
    let mut other = two[0].clone();
    // A text that varies is in labels, too.
    other.device = format!("{nasty}{nasty}");
    let all = [two.to_vec(), vec![other]].concat();
    for results in [&two[..], &all] {
        let names = check_page(&page(results));
        assert!(names.is_subset(&plain), "{names:?}");
    }
    assert!(page(&two).contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
    assert!(!table(&all).contains('\u{1b}'));
}

#[test]
fn page_of_extreme_results_is_valid() {
    assert!(page(&[]).contains("Nothing was measured"));
    check_page(&page(&[]));
    assert!(table(&[]).starts_with("backend"));
    for rate in [0.0, f64::NAN, f64::INFINITY, -1.0, f64::MIN_POSITIVE, 1e18] {
        for ns in [0, 1, u64::MAX] {
            let mut results = [pair(1), pair(2), pair(4)].concat();
            for (at, figures) in results.iter_mut().enumerate() {
                figures.ops_per_s = rate;
                figures.runs =
                    if at % 2 == 0 { vec![] } else { vec![Run { ops: 0, seconds: rate, ops_per_s: rate }] };
                (figures.p50_ns, figures.p99_ns, figures.p999_ns, figures.max_ns) = (ns, ns, ns, ns);
                figures.latency = vec![[ns, ns]];
                figures.batches = vec![[1 << 63, ns]];
                figures.limit_ns = Some(rate);
                figures.seconds = rate;
            }
            let names = check_page(&page(&results));
            assert!(names.contains("table"));
            assert!(!table(&results).contains("NaN"), "{}", table(&results));
        }
    }
    let bare = Figures {
        latency: vec![],
        batches: vec![],
        runs: vec![],
        per_rank: vec![],
        ..result(Backend::Meta, 1, &[])
    };
    let html = page(&[bare]);
    check_page(&html);
    assert!(html.contains("only the percentiles were kept"));
}

#[test]
fn page_of_many_results_limits_its_plots() {
    let many: Vec<Figures> =
        (0..100).flat_map(|at| pair(2).map(|figures| Figures { keys: at, ..figures })).collect();
    let html = page(&many);
    check_page(&html);
    assert!(html.contains("76 more configurations are in the table alone"));
    let path = std::env::temp_dir().join(format!("crosstie-report-{}.html", std::process::id()));
    let too_many = vec![many[0].clone(); super::MAX_RESULTS + 1];
    assert!(write(&too_many, &path).is_err());
    assert!(!path.exists());
}
