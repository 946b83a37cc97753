//! The result: as JSON and as a table.

use std::collections::BTreeMap;

use crosstie::telemetry::Histogram;
use serde::Serialize;

use super::plan::{Kind, Plan, TransportName};
use crate::table;
use crate::units::{scaled, time};

/// The JSON object that `--json` prints.
#[derive(Debug, Serialize)]
pub struct GroupSummary {
    bench: &'static str,
    device: String,
    members: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    contention: Option<f64>,
    loss: f64,
    transport: &'static str,
    ops: u64,
    seconds: f64,
    ops_per_s: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    /// Messages that were lost, changed or out of order.
    pub errors: u64,
    /// Packets of all members for one operation.
    messages_per_op: f64,
    counters: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ns: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_limit: Option<f64>,
}

impl GroupSummary {
    #[expect(clippy::too_many_arguments, reason = "called once")]
    pub(super) fn new(
        plan: &Plan,
        ops: u64,
        seconds: f64,
        ops_per_s: f64,
        latency: &Histogram,
        errors: u64,
        counters: BTreeMap<String, u64>,
        limit_ns: Option<f64>,
        limit_ops_per_s: Option<f64>,
    ) -> GroupSummary {
        let quantile = |q| latency.quantile(q).unwrap_or(0);
        let messages = counters.get("messages").copied().unwrap_or(0);
        let operations = counters
            .get("acquisitions")
            .or_else(|| counters.get("sent"))
            .or_else(|| counters.get("rounds"))
            .copied()
            .unwrap_or(ops);
        GroupSummary {
            bench: plan.kind.name(),
            device: plan.arguments.device.to_string(),
            members: plan.arguments.members,
            payload: (plan.kind == Kind::Message).then_some(plan.arguments.payload),
            contention: (plan.kind == Kind::Lock).then_some(plan.arguments.contention),
            loss: plan.arguments.loss,
            transport: match plan.arguments.transport {
                TransportName::Rc => "rc",
                TransportName::Ud => "ud",
            },
            ops,
            seconds: (seconds * 1e6).round() / 1e6,
            ops_per_s: ops_per_s.round(),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            errors,
            messages_per_op: (messages as f64 / operations.max(1) as f64 * 1e3).round() / 1e3,
            counters,
            limit_ns: limit_ns.map(|ns| (ns * 10.0).round() / 10.0),
            limit_ops_per_s: limit_ops_per_s.map(f64::round),
            ratio_to_limit: limit_ops_per_s
                .filter(|limit| *limit > 0.0)
                .map(|limit| (ops_per_s / limit * 1e4).round() / 1e4),
        }
    }

    /// The result as a table.
    pub fn table(&self) -> String {
        let dash = || String::from("-");
        let mut rows = vec![[String::new(), "crosstie".into(), "limit".into()]];
        rows.push([
            "operations/s".into(),
            scaled(self.ops_per_s),
            self.limit_ops_per_s.map_or_else(dash, scaled),
        ]);
        rows.push([
            "p50".into(),
            time(self.p50_ns),
            self.limit_ns.map_or_else(dash, |ns| time(ns.round() as u64)),
        ]);
        rows.push(["p99".into(), time(self.p99_ns), dash()]);
        rows.push(["p99.9".into(), time(self.p999_ns), dash()]);
        rows.push(["packets for one operation".into(), format!("{:.3}", self.messages_per_op), dash()]);
        let counters: Vec<String> =
            self.counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
        format!(
            "{} with {} {}, device {}, messages over {}, loss {}\n\n{}\n{} operations in {:.2} s, {} errors; {}\n\
             limit: minimal code that streams the same messages; for p50, the round trip of one cache line\n",
            self.bench,
            self.members,
            if self.members == 1 { "member" } else { "members" },
            self.device,
            self.transport,
            self.loss,
            table::figures(&rows),
            self.ops,
            self.seconds,
            self.errors,
            counters.join(", ")
        )
    }
}
