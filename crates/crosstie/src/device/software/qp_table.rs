//! The queue pairs of a device, by their numbers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::layout::QpNum;
use super::lock::locked;

/// Queue pairs (`Q`), and their numbers. It reuses the index that was returned first, with the next generation of the number.
#[derive(Debug)]
pub(super) struct QpTable<Q>(Mutex<Table<Q>>);

#[derive(Debug)]
struct Table<Q> {
    /// By index: the last number that was handed out.
    last: Vec<u32>,
    free: VecDeque<u32>,
    by_index: Vec<Option<Arc<Q>>>,
}

impl<Q> QpTable<Q> {
    pub(super) fn new() -> QpTable<Q> {
        QpTable(Mutex::new(Table { last: Vec::new(), free: VecDeque::new(), by_index: Vec::new() }))
    }

    /// The number of a new queue pair. `None` if all are in use.
    pub(super) fn take_number(&self) -> Option<QpNum> {
        let Table { last, free, by_index } = &mut *locked(&self.0);
        // Indices that were never used come first, so that a number repeats as late as possible.
        if (last.len() as u32) < QpNum::INDICES {
            let number = QpNum::first(last.len() as u32);
            last.push(number.bits());
            by_index.push(None);
            return Some(number);
        }
        let index = free.pop_front()? as usize;
        let number = QpNum::from_bits(last[index]).next();
        last[index] = number.bits();
        Some(number)
    }

    /// The queue pair that was to have this number could not be made.
    pub(super) fn give_back_number(&self, number: QpNum) {
        locked(&self.0).free.push_back(number.index());
    }

    pub(super) fn insert(&self, number: QpNum, qp: Arc<Q>) {
        locked(&self.0).by_index[number.index() as usize] = Some(qp);
    }

    /// Removes a queue pair. Its index will be used again.
    pub(super) fn remove(&self, num: u32) {
        let index = QpNum::from_bits(num).index();
        let mut table = locked(&self.0);
        table.by_index[index as usize] = None;
        table.free.push_back(index);
    }

    /// The queue pair with this number.
    pub(super) fn get(&self, num: u32) -> Option<Arc<Q>> {
        let index = QpNum::from_bits(num).index() as usize;
        let table = locked(&self.0);
        table.by_index.get(index)?.clone().filter(|_| table.last[index] == num)
    }

    pub(super) fn all(&self) -> Vec<Arc<Q>> {
        locked(&self.0).by_index.iter().flatten().cloned().collect()
    }

    /// Uses up the indices that were never used: the next queue pair gets that of one that is gone.
    #[cfg(test)]
    pub(super) fn use_up_indices(&self) {
        let Table { last, by_index, .. } = &mut *locked(&self.0);
        last.extend((last.len() as u32..QpNum::INDICES).map(|index| QpNum::first(index).bits()));
        by_index.resize_with(last.len(), || None);
    }
}
