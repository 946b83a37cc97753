//! Each rule is turned off once: the models must find the failure that it prevents.

use std::fmt::Debug;
use std::hash::Hash;
use std::vec::Vec;

use stateright::{Checker, Model};

use super::super::message::{OnGap, OnRefusal};
use super::barrier_model::BarrierModel;
use super::lock_model::LockModel;
use super::message_model::MessageModel;
use super::{BrokenRule, failed_rules};

fn failures_of<M>(model: M) -> Vec<&'static str>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    // A broken rule may also make a peer break a rule, which the network of the models reports by a panic.
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        failed_rules(&model.checker().threads(1).spawn_bfs().join())
    }));
    checked.unwrap_or_else(|_| Vec::from(["a member was sent a packet that breaks the rules"]))
}

#[test]
fn lock_model_finds_each_broken_rule() {
    for rule in [BrokenRule::HandsOverWhileHealing, BrokenRule::ForgetsWhoGotTheLock] {
        let model = LockModel {
            members: 3,
            requests: 1,
            deaths: 1,
            expulsions: 0,
            may_give_up: false,
            broken_rule: Some(rule),
        };
        let failures = failures_of(model);
        std::println!("{rule:?}: {failures:?}");
        assert!(!failures.is_empty(), "the model does not notice {rule:?}");
    }
}

#[test]
fn barrier_model_finds_each_broken_rule() {
    // The coordinator does not take part: otherwise it is the root, and no round ends without it.
    for (rule, members, rounds) in [
        (BrokenRule::EndsRoundsWhileHealing, 4, 2),
        (BrokenRule::TrustsTheCoordinatorOnly, 4, 2),
        (BrokenRule::ForgetsReleasesWhileHealing, 5, 1),
    ] {
        let model = BarrierModel { members, rounds, first: 1, deaths: 1, broken_rule: Some(rule) };
        let failures = failures_of(model);
        std::println!("{rule:?}: {failures:?}");
        assert!(!failures.is_empty(), "the model does not notice {rule:?}");
    }
}

#[test]
fn message_model_finds_each_broken_rule() {
    for (rule, messages, room, losses) in [
        (BrokenRule::AcceptsBehindAGap, 3, 2, 1),
        (BrokenRule::NeverSendsAgain, 3, 2, 1),
        (BrokenRule::DeliversHeldPacketsTooEarly, 4, 4, 2),
        (BrokenRule::SendsBeyondCredit, 4, 2, 0),
        (BrokenRule::ForgetsToResume, 4, 2, 0),
    ] {
        let model = MessageModel {
            messages,
            on_refusal: OnRefusal::WaitForRequest,
            on_gap: OnGap::Selective,
            combine_from: u32::MAX,
            room,
            losses,
            duplicates: 0,
            timeouts: u8::from(losses > 0),
            reorders: false,
            broken_rule: Some(rule),
        };
        let failures = failures_of(model);
        std::println!("{rule:?}: {failures:?}");
        assert!(!failures.is_empty(), "the model does not notice {rule:?}");
    }
}
