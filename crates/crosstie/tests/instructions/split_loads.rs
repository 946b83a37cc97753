//! Counts loads of bytes that were stored in other pieces shortly before: in several stores, or only some of them.
//!
//! A processor hands bytes to a load before they have reached the cache, if one store has all of them. Otherwise the load waits until that
//! store and all before it have reached the cache, and one of them may be waiting for a cache line of another core. A count of instructions
//! does not show that. Usually a struct is built field by field and then copied whole.
//!
//! The work is that of [`callgrind::measure`]. Valgrind's tool `lackey` prints every access to memory:
//!
//! ```text
//! I  0401a7b0,3      an instruction at an address, of so many bytes
//!  S 1ffeffe7e0,8    it stores to an address so many bytes (L: loads, M: both)
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use super::callgrind;

/// Most stores that are on their way to the cache at a time: those that the store buffer of a processor has room for.
const STORES: usize = 56;
/// So many instructions later a store has reached the cache, unless it or one before it has to wait.
const RECENT: u64 = 64;
/// At most one of so many operations may have such a load.
const ONE_OF: u64 = 10;

/// Fails if the operations of a task have such loads.
pub(crate) fn assert_none(test: &str, task: &str, operations: u32) {
    let loads = find(test, task);
    let count: u64 = loads.values().sum();
    println!("{task}: {count} loads of what was just stored in other pieces, in {operations} operations");
    let places: Vec<String> =
        loads.iter().map(|(at, count)| format!("{count} at crosstie_measured + {at:#x}")).collect();
    assert!(
        count * ONE_OF <= operations.into(),
        "{task}: loads of what was just stored in other pieces: {}",
        places.join(", ")
    );
}

struct Store {
    from: u64,
    end: u64,
    /// Instructions that were executed before.
    time: u64,
}

fn address(digits: &str) -> u64 {
    u64::from_str_radix(digits, 16).unwrap()
}

/// The loads of a task: how many each instruction has executed, by its distance from the function that does the work.
fn find(test: &str, task: &str) -> BTreeMap<u64, u64> {
    let tool = ["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"];
    let child = callgrind::valgrind(&tool, test, task).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|error| {
        panic!("valgrind cannot be started ({error}): install the Debian package `valgrind`")
    });
    let (mut begin, mut end, mut is_measured) = (0, 0, false);
    let (mut instruction, mut time) = (0, 0);
    let mut stores: VecDeque<Store> = VecDeque::new();
    let mut loads = BTreeMap::new();
    let (mut trace, mut line) = (BufReader::new(child.stderr.take().unwrap()), String::new());
    loop {
        line.clear();
        if trace.read_line(&mut line).unwrap() == 0 {
            break;
        }
        if let Some((_, places)) = line.split_once(callgrind::MEASURED) {
            let (from, to) = places.trim().split_once(' ').unwrap();
            (begin, end) = (address(from), address(to));
        }
        let (Some(kind @ ("I  " | " L " | " S " | " M ")), Some((at, len))) =
            (line.get(..3), line.get(3..).and_then(|access| access.split_once(',')))
        else {
            continue;
        };
        let from = address(at);
        if kind == "I  " {
            (instruction, time) = (from, time + 1);
            is_measured = instruction == begin || is_measured && instruction != end;
            continue;
        }
        if !is_measured {
            continue;
        }
        let to = from + len.trim_end().parse::<u64>().unwrap();
        if kind != " S " {
            let last = stores.iter().rev().find(|store| store.from < to && from < store.end);
            let is_split =
                |store: &Store| (from < store.from || store.end < to) && time - store.time < RECENT;
            if last.is_some_and(is_split) {
                *loads.entry(instruction - begin).or_default() += 1;
            }
        }
        if kind != " L " {
            if stores.len() == STORES {
                stores.pop_front();
            }
            stores.push_back(Store { from, end: to, time });
        }
    }
    assert!(child.wait().unwrap().success(), "{task}");
    assert!(time > 0 && begin > 0, "{test} has measured nothing when its task was {task:?}");
    loads
}
