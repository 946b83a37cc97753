//! From the number of a queue pair to its connection.

/// Queue pair numbers and what they stand for: open addressing, so that a lookup is one step nearly always.
#[derive(Debug, Default)]
pub(super) struct QpTable {
    /// A number and an index each; the length is a power of two, or zero.
    places: Vec<Option<(u32, u32)>>,
    used: usize,
}

impl QpTable {
    #[inline]
    fn place(&self, qp_num: u32) -> usize {
        // Numbers are handed out one after the other, or differ in their low bits otherwise.
        qp_num as usize & (self.places.len() - 1)
    }

    #[inline]
    pub(super) fn get(&self, qp_num: u32) -> Option<u32> {
        if self.places.is_empty() {
            return None;
        }
        let mut place = self.place(qp_num);
        while let Some((number, index)) = self.places[place] {
            if number == qp_num {
                return Some(index);
            }
            place = (place + 1) & (self.places.len() - 1);
        }
        None
    }

    pub(super) fn insert(&mut self, qp_num: u32, index: u32) {
        if 4 * (self.used + 1) > self.places.len() {
            let larger = (8 * (self.used + 1)).next_power_of_two();
            let former = std::mem::replace(&mut self.places, vec![None; larger]);
            for (number, index) in former.into_iter().flatten() {
                self.put(number, index);
            }
        }
        self.put(qp_num, index);
        self.used += 1;
    }

    fn put(&mut self, qp_num: u32, index: u32) {
        let mut place = self.place(qp_num);
        while self.places[place].is_some() {
            place = (place + 1) & (self.places.len() - 1);
        }
        self.places[place] = Some((qp_num, index));
    }

    pub(super) fn remove(&mut self, qp_num: u32) {
        if self.get(qp_num).is_none() {
            return;
        }
        self.used -= 1;
        // Rare: put the rest back, so that no gap hides anybody.
        let len = self.places.len();
        let former = std::mem::replace(&mut self.places, vec![None; len]);
        for (number, index) in former.into_iter().flatten().filter(|(number, _)| *number != qp_num) {
            self.put(number, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_there_and_nothing_else() {
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
