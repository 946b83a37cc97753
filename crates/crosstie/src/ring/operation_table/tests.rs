//! What can be tested with one thread.

use super::*;

#[test]
fn submitted_operations_are_taken_in_order() {
    let table = OperationTable::<u32>::new(8);
    for round in 0..3 {
        let sides: Vec<_> = (0..5).map(|value| table.lease(10 * round + value).unwrap()).collect();
        sides.iter().for_each(|side| table.submit(side));
        let mut taken = Vec::new();
        table.take_submitted(|mut op| {
            taken.push(op.with_value(&table, |value| *value));
            assert!(op.give_back(&table, 0));
        });
        assert_eq!(taken, (10 * round..10 * round + 5).collect::<Vec<_>>());
        assert!(!table.has_submitted());
        sides.into_iter().for_each(|side| _ = side.take(&table).unwrap());
    }
}

/// A key of a former operation, for example in the list of deadlines, does not reach the operation that uses the entry now.
#[test]
fn key_of_a_former_operation_changes_nothing() {
    let table = OperationTable::<u32>::new(1);
    let mut former = Vec::new();
    for value in 0..5 {
        let side = table.lease(value).unwrap();
        assert!(!former.contains(&side.key()), "another generation");
        for key in &former {
            assert!(!table.end(*key, 7) && !table.is_live(*key));
        }
        assert!(table.is_live(side.key()) && !side.word(&table).is_ended());
        former.push(side.key());
        table.submit(&side);
        table.take_submitted(|op| assert!(op.give_back(&table, 0), "nobody has ended it"));
        assert_eq!(side.take(&table).unwrap(), value);
    }
}
