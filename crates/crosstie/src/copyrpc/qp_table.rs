//! A hash table from queue pair numbers to connection keys.

/// Open addressing with linear probing; at most a quarter full, so a lookup nearly always takes one step.
#[derive(Debug, Default)]
pub(super) struct QpTable {
    /// Queue pair number and key. The length is a power of two, or zero.
    entries: Vec<Option<(u32, u32)>>,
    used: usize,
}

impl QpTable {
    #[inline]
    fn home(&self, qp_num: u32) -> usize {
        // Devices hand out numbers that differ in their low bits, mostly one after the other.
        qp_num as usize & (self.entries.len() - 1)
    }

    #[inline]
    pub(super) fn get(&self, qp_num: u32) -> Option<u32> {
        if self.entries.is_empty() {
            return None;
        }
        let mut at = self.home(qp_num);
        while let Some((number, key)) = self.entries[at] {
            if number == qp_num {
                return Some(key);
            }
            at = (at + 1) & (self.entries.len() - 1);
        }
        None
    }

    pub(super) fn insert(&mut self, qp_num: u32, key: u32) {
        if 4 * (self.used + 1) > self.entries.len() {
            let larger = (8 * (self.used + 1)).next_power_of_two();
            let former = std::mem::replace(&mut self.entries, vec![None; larger]);
            for (number, key) in former.into_iter().flatten() {
                self.place(number, key);
            }
        }
        self.place(qp_num, key);
        self.used += 1;
    }

    fn place(&mut self, qp_num: u32, key: u32) {
        let mut at = self.home(qp_num);
        while self.entries[at].is_some() {
            at = (at + 1) & (self.entries.len() - 1);
        }
        self.entries[at] = Some((qp_num, key));
    }

    pub(super) fn remove(&mut self, qp_num: u32) {
        if self.get(qp_num).is_none() {
            return;
        }
        self.used -= 1;
        // Rare, so simple: rebuild the table, because a gap would end a probe sequence too early.
        let len = self.entries.len();
        let former = std::mem::replace(&mut self.entries, vec![None; len]);
        for (number, key) in former.into_iter().flatten().filter(|(number, _)| *number != qp_num) {
            self.place(number, key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_finds_inserted_numbers_and_no_others() {
        let mut table = QpTable::default();
        assert_eq!(table.get(7), None);
        let numbers: Vec<u32> = (0..500).map(|i| i * 64 + 3).collect();
        for (index, number) in numbers.iter().enumerate() {
            table.insert(*number, index as u32);
        }
        for number in numbers.iter().step_by(3) {
            table.remove(*number);
        }
        for (index, number) in numbers.iter().enumerate() {
            let expected = (index % 3 != 0).then_some(index as u32);
            assert_eq!(table.get(*number), expected);
            assert_eq!(table.get(number + 1), None);
        }
    }
}
