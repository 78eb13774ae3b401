//! What is going on: every agent is asked, and the store is held against what they say.

use std::collections::BTreeMap;

use vmferry_planner_core::doctor::{
    Answer, Diagnosis, Finding, HostSaid, Picture, Runner, Standing, Under, examine,
};
use vmferry_planner_core::migration::{Handover, SourceWord, Word};
use vmferry_proto::v1;
use vmferry_types::VmId;

use super::ApiError;
use crate::planner::Planner;
use crate::store::{Filter, MigrationRow};
use crate::{clock, picture, view};

/// As many migrations are looked through for the last one that was committed of each VM.
const MOVES: u32 = 1000;

impl Planner {
    /// Asks every agent and compares with the store; touches nothing.
    ///
    /// # Errors
    ///
    /// Fails if there is no such VM, or if the store does.
    pub async fn doctor(&self, asked: &v1::DoctorRequest) -> Result<v1::DoctorReply, ApiError> {
        let only = if asked.vm.is_empty() {
            None
        } else {
            Some(self.resolve_vm("vm", &asked.vm).await?.id)
        };
        let mut seen = picture::live(self).await?;
        let mut diagnosis = examine(&seen);
        if diagnosis.findings.iter().any(is_momentary) {
            // Answers are not of one instant: a guest that moves between two of them is seen on
            // neither or on both. What is so is so the second time.
            seen = picture::live(self).await?;
            let again = examine(&seen);
            diagnosis = agreed(&diagnosis, again);
        }
        let moves = self.last_moves(only).await?;
        Ok(reply(&seen, &diagnosis, &moves, only))
    }

    /// Returns the last migration of each VM that was committed.
    async fn last_moves(
        &self,
        only: Option<VmId>,
    ) -> Result<BTreeMap<VmId, MigrationRow>, ApiError> {
        let filter = Filter { vm: only, limit: MOVES, ..Filter::default() };
        let mut last = BTreeMap::new();
        for row in self.store().migrations(&filter).await? {
            if row.migration.phase.handover().is_some() {
                last.entry(row.migration.vm).or_insert(row);
            }
        }
        Ok(last)
    }
}

/// Says whether a finding may come from two answers of different instants.
fn is_momentary(finding: &Finding) -> bool {
    finding.vm.is_some()
        && !matches!(finding.code, "lost" | "stuck" | "undecided" | "orphan" | "waits_for_room")
}

/// Keeps of the second look what the first one saw too.
fn agreed(first: &Diagnosis, mut second: Diagnosis) -> Diagnosis {
    let key = |of: &Finding| (of.code, of.host.clone(), of.vm, of.migration);
    second.findings.retain(|finding| {
        !is_momentary(finding) || first.findings.iter().any(|before| key(before) == key(finding))
    });
    second.halves.retain(|half| {
        first.halves.iter().any(|before| {
            before.migration == half.migration
                && before.host == half.host
                && before.side == half.side
        })
    });
    second
}

fn reply(
    seen: &Picture,
    diagnosis: &Diagnosis,
    moves: &BTreeMap<VmId, MigrationRow>,
    only: Option<VmId>,
) -> v1::DoctorReply {
    let wanted = |vm: Option<VmId>| only.is_none() || vm.is_none() || vm == only;
    let findings: Vec<v1::Finding> = diagnosis
        .findings
        .iter()
        .filter(|finding| wanted(finding.vm))
        .map(|finding| self::finding(seen, finding))
        .collect();
    let vms = seen
        .vms
        .iter()
        .zip(&diagnosis.runners)
        .filter(|(vm, _)| wanted(Some(vm.id)))
        .map(|(vm, (_, runner))| {
            let (runs_on, runners) = match runner {
                Runner::One(host) => (host.to_string(), runner.label()),
                Runner::None | Runner::Unknown | Runner::Several(_) => {
                    (String::new(), runner.label())
                }
            };
            let mut check = v1::VmCheck {
                id: vm.id.to_string(),
                name: vm.name.clone(),
                host: vm.host.as_ref().map(ToString::to_string).unwrap_or_default(),
                power: vm.power.label().to_owned(),
                generation: vm.generation.value(),
                claim: vm.claim.value(),
                runs_on,
                runners: runners.to_owned(),
                ..v1::VmCheck::default()
            };
            if let Under::Migration(id) = vm.under {
                check.migration_id = id.to_string();
            }
            if let Some(row) = moves.get(&vm.id) {
                last_move(&mut check, row);
            }
            check
        })
        .collect();
    v1::DoctorReply {
        at: clock::rfc3339(seen.now),
        hosts: seen.hosts.iter().map(host).collect(),
        well: findings.iter().all(|finding| finding.severity != "error"),
        vms,
        findings,
        halves: diagnosis
            .halves
            .iter()
            .filter(|half| wanted(Some(half.vm())))
            .map(view::half)
            .collect(),
    }
}

fn last_move(check: &mut v1::VmCheck, row: &MigrationRow) {
    let Some(handover) = row.migration.phase.handover() else { return };
    if check.migration_id == row.migration.id.to_string() {
        check.migration_phase = row.migration.label().label().to_owned();
    }
    check.last_move = row.migration.id.to_string();
    check.last_move_at = clock::rfc3339_us(row.ended_us.unwrap_or(row.updated_us));
    check.proof = serde_json::to_string(handover).unwrap_or_default();
    check.proof_words = proof_words(row, handover);
}

/// Says for people what both QEMUs said when ownership moved.
fn proof_words(row: &MigrationRow, handover: &Handover) -> String {
    let word = |word: &Word| {
        format!(
            "QEMU {} said {} and {}",
            word.process.pid,
            word.transfer.word(),
            word.run_state.word()
        )
    };
    let source = match &handover.source {
        SourceWord::Completed(said) | SourceWord::Serves(said) => word(said),
        SourceWord::Gone(proof) => proof.to_string(),
        SourceWord::ShutDown(proof) => format!("shut down for its move: {proof}"),
    };
    let destination = row.migration.destination().map(ToString::to_string).unwrap_or_default();
    format!(
        "source {}: {source}; destination {destination}: {}",
        row.migration.source,
        word(&handover.destination)
    )
}

fn finding(seen: &Picture, of: &Finding) -> v1::Finding {
    let name = of.vm.and_then(|id| seen.vms.iter().find(|vm| vm.id == id));
    v1::Finding {
        severity: of.severity.label().to_owned(),
        code: of.code.to_owned(),
        host: of.host.as_ref().map(ToString::to_string).unwrap_or_default(),
        vm_id: of.vm.map(|id| id.to_string()).unwrap_or_default(),
        vm_name: name.map(|vm| vm.name.clone()).unwrap_or_default(),
        migration_id: of.migration.map(|id| id.to_string()).unwrap_or_default(),
        message: of.message.clone(),
    }
}

fn host(said: &HostSaid) -> v1::HostCheck {
    let dead = said.declared.as_ref().filter(|of| of.standing == Standing::Holds);
    let (answer, note) = match (&said.answer, dead) {
        (Answer::Whole, _) => ("answered", String::new()),
        (Answer::Learning, _) => ("learning", "it is still learning what runs there".to_owned()),
        (Answer::Unreadable, _) => ("unreadable", "its journal is new, lost or broken".to_owned()),
        (Answer::Silent { .. }, Some(dead)) => {
            ("declared_dead", format!("by {}: {}", dead.by, dead.reason))
        }
        (Answer::Silent { reason, .. }, None) => ("silent", reason.clone()),
    };
    let running = said.vms.iter().filter(|there| there.runs()).count();
    v1::HostCheck {
        id: said.id.to_string(),
        answer: answer.to_owned(),
        note,
        running: u32::try_from(running).unwrap_or(u32::MAX),
        boot_id: said.boot_id.clone(),
    }
}
