//! How a trial went, for people and for programs.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::caller::Caller;
use crate::checks;
use crate::database::{Database, Kind};
use crate::disturbance::Disturbed;
use crate::fleet::{Counts, Fleet, Stillness};
use crate::trial::Plan;

/// How a trial went.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Migrations by how they ended: the phase, and why if they came back.
    pub ends: BTreeMap<String, u64>,
    /// What is wrong; empty if all is well.
    pub failures: Vec<String>,
    /// Planners killed and stopped.
    pub disturbed: Disturbed,
    /// Migrations that went from one planner process to another.
    pub take_overs: usize,
    /// From the first wish to the last end.
    pub took: Duration,
    /// How long moves took from their admission to their end, sorted, in microseconds.
    pub moves_us: Vec<u64>,
    /// How long guests stood still.
    pub stillness: Stillness,
    /// What the agents counted.
    pub counts: Counts,
    /// Calls that were refused or that nobody answered, and asked again, by the planner's code.
    pub asked_again: BTreeMap<String, u64>,
    /// Moves that went on with a guest held still after the live one was refused.
    pub downgraded: u64,
    seed: u64,
    store: Kind,
}

impl Summary {
    /// Counts what is in the store, beside what its parts have counted.
    pub(crate) async fn of(
        plan: &Plan,
        database: &Database,
        (fleet, caller): (&Fleet, &Caller),
        (disturbed, took): (Disturbed, Duration),
        failures: Vec<String>,
    ) -> Result<Self> {
        let ends = database
            .rows(
                "SELECT m.phase || CASE WHEN m.phase IN ('aborted', 'failed') THEN ': ' || \
                 coalesce((SELECT l.event FROM migration_log l WHERE l.migration_id = m.id \
                           AND l.phase IN ('rolling_back', 'aborted', 'failed') \
                           ORDER BY l.seq LIMIT 1), '') ELSE '' END AS how, \
                 m.id FROM migrations m",
            )
            .await?;
        let mut counted: BTreeMap<String, u64> = BTreeMap::new();
        for row in &ends {
            *counted.entry(row.first().cloned().unwrap_or_default()).or_default() += 1;
        }
        let spans = database
            .rows(
                "SELECT CAST(m.ended_us - (SELECT min(l.at_us) FROM migration_log l \
                 WHERE l.migration_id = m.id AND l.phase = 'admitted') AS TEXT) \
                 FROM migrations m WHERE m.phase = 'done'",
            )
            .await?;
        let mut moves_us: Vec<u64> =
            spans.iter().filter_map(|row| row.first()?.parse().ok()).collect();
        moves_us.sort_unstable();
        let mut again = caller.asked.reasons.lock().await.clone();
        again.insert("unanswered".to_owned(), caller.asked.unanswered.load(Ordering::Relaxed));
        let downgraded = database
            .rows("SELECT id FROM migrations WHERE record LIKE '%\"downgraded\":{%'")
            .await?;
        Ok(Self {
            ends: counted,
            failures,
            disturbed,
            take_overs: checks::take_overs(database).await?,
            took,
            moves_us,
            stillness: fleet.stillness(),
            counts: fleet.counts(),
            asked_again: again,
            downgraded: u64::try_from(downgraded.len()).unwrap_or(u64::MAX),
            seed: plan.seed,
            store: plan.store,
        })
    }

    fn move_ms(&self, percent: usize) -> f64 {
        let last = self.moves_us.len().saturating_sub(1);
        let at = (self.moves_us.len() * percent / 100).min(last);
        millis(self.moves_us.get(at).copied().unwrap_or(0))
    }

    /// Returns how many migrations there were.
    #[must_use]
    pub fn migrations(&self) -> u64 {
        self.ends.values().sum()
    }

    /// Returns how many migrations moved their VM.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.ends.get("done").copied().unwrap_or_default()
    }

    /// Tells it to people.
    #[must_use]
    pub fn told(&self) -> String {
        let ends: Vec<String> = self.ends.iter().map(|(how, n)| format!("{n} {how}")).collect();
        let again: Vec<String> =
            self.asked_again.iter().map(|(code, n)| format!("{n} {code}")).collect();
        let refusals: Vec<String> =
            self.counts.refusals.iter().map(|(code, n)| format!("{n} {code}")).collect();
        format!(
            "load: {} migrations in {:.1} s: {}\n\
             load: {} kills, {} freezes, {} take-overs, {} claims, {} replays; agents refused {}\n\
             load: one move takes {:.0} ms (p50), {:.0} ms (p99); a guest stands still {:.0} ms (p50), {:.0} ms (p99), {:.0} ms (longest)\n\
             load: {} requests or answers lost, late or doubled, {} transfers broken, {} moves downgraded\n\
             load: asked again: {}\n\
             load: {}",
            self.migrations(),
            self.took.as_secs_f64(),
            ends.join(", "),
            self.disturbed.kills,
            self.disturbed.freezes,
            self.take_overs,
            self.counts.claims,
            self.counts.replays,
            if refusals.is_empty() { "nothing".to_owned() } else { refusals.join(", ") },
            self.move_ms(50),
            self.move_ms(99),
            millis(self.stillness.p50_us),
            millis(self.stillness.p99_us),
            millis(self.stillness.max_us),
            self.counts.mishaps,
            self.counts.breaks,
            self.downgraded,
            again.join(", "),
            if self.failures.is_empty() { "all is well" } else { "FAILED" },
        )
    }

    /// Returns it as one object; every duration names its unit.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "store": match self.store { Kind::Sqlite => "sqlite", Kind::Postgres => "postgres" },
            "seed": self.seed,
            "migrations": self.migrations(),
            "ends": self.ends,
            "kills": self.disturbed.kills,
            "freezes": self.disturbed.freezes,
            "take_overs": self.take_overs,
            "wall_s": self.took.as_secs_f64(),
            "move_p50_ms": self.move_ms(50),
            "move_p99_ms": self.move_ms(99),
            "still_p50_ms": millis(self.stillness.p50_us),
            "still_p99_ms": millis(self.stillness.p99_us),
            "still_max_ms": millis(self.stillness.max_us),
            "claims": self.counts.claims,
            "replays": self.counts.replays,
            "commands": self.counts.commands,
            "refusals": self.counts.refusals,
            "reports": self.counts.reports,
            "mishaps": self.counts.mishaps,
            "broken_transfers": self.counts.breaks,
            "downgraded": self.downgraded,
            "asked_again": self.asked_again,
            "failures": self.failures,
        })
    }
}

fn millis(us: u64) -> f64 {
    Duration::from_micros(us).as_secs_f64() * 1000.0
}
