//! What hosts say, beside what the store says, in the words of the core's comparison.

use std::collections::BTreeSet;

use futures::stream::{self, StreamExt as _};
use vmferry_planner_core::doctor::{
    Answer, Declared, GaveUp, HostSaid, Known, Move, Orphan, Picture, Process, Remains, Standing,
    Under, Waits,
};
use vmferry_planner_core::evidence::{Continued, Handed, Knowledge, RunState};
use vmferry_planner_core::migration::{Cleanup, Phase};
use vmferry_planner_core::queue::told;
use vmferry_proto::v1;
use vmferry_types::{Claim, Generation, HostId, MigrationId, Role, Timestamp, VmId};

use crate::clock;
use crate::inventory::Worth;
use crate::planner::Planner;
use crate::queue::{Queued, Row, queued};
use crate::store::{Filter, HostRow, MigrationRow, OnlyOpen, StoreError, VmRow};
use crate::telemetry::Chain;
use crate::view;

/// As many agents are asked at once; each has seconds to answer.
const ASKED_AT_ONCE: usize = 32;

/// Asks every agent now, then reads the store.
///
/// # Errors
///
/// Fails if the store does.
pub async fn live(planner: &Planner) -> Result<Picture, StoreError> {
    planner.parts.inventory.reread(planner.store()).await?;
    let hosts = planner.parts.inventory.hosts();
    let mut said: Vec<HostSaid> = stream::iter(hosts)
        .map(|(row, heard)| async move {
            let heard = heard.map(|heard| heard.at);
            match planner.parts.agents.report(&row.id).await {
                Ok(report) => answered(&row, &report),
                Err(error) => silent(&row, Chain(&error).to_string(), heard),
            }
        })
        .buffer_unordered(ASKED_AT_ONCE)
        .collect()
        .await;
    said.sort_by(|a, b| a.id.cmp(&b.id));
    with_store(planner, said).await
}

/// Takes what hosts reported last, then reads the store.
///
/// # Errors
///
/// Fails if the store does.
pub async fn reported(planner: &Planner) -> Result<Picture, StoreError> {
    let hosts = planner.parts.inventory.hosts();
    let said = hosts
        .iter()
        .map(|(row, heard)| match heard {
            Some(heard) => answered(row, &heard.report),
            None => silent(row, "it has not reported".to_owned(), None),
        })
        .collect();
    with_store(planner, said).await
}

async fn with_store(planner: &Planner, hosts: Vec<HostSaid>) -> Result<Picture, StoreError> {
    let store = planner.store();
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let rows = store.migrations(&open).await?;
    let mut moves: Vec<Move> = rows.iter().map(|row| of_row(planner, row)).collect();
    let known: BTreeSet<MigrationId> = moves.iter().map(|of| of.id).collect();
    let named: BTreeSet<MigrationId> = hosts
        .iter()
        .flat_map(|host| &host.vms)
        .filter(|there| there.process == Process::Alive && half_of_a_move(there))
        .filter_map(|there| there.migration)
        .filter(|id| !known.contains(id))
        .collect();
    for id in named {
        if let Some(row) = store.migration(id).await? {
            moves.push(of_row(planner, &row));
        }
    }
    let now = clock::now();
    let queue: Vec<Waits> = queued(planner).await?.iter().map(|of| waits(of, now)).collect();
    let queued = queue.iter().map(|waits| waits.id).collect();
    let vms = store.vms().await?.iter().map(|row| of_vm(row, &known, &queued)).collect();
    Ok(Picture { now, hosts, vms, moves, queue })
}

/// Says whether a row may be asked for: of a guest that simply runs, its last start need not be.
fn half_of_a_move(there: &Remains) -> bool {
    match there.role {
        Role::Receiver => true,
        Role::Running | Role::Held => {
            there.handed == Handed::Yes
                || matches!(there.run_state, RunState::FinishMigrate | RunState::PostMigrate)
        }
        Role::Stopped | Role::Absent => false,
    }
}

fn of_row(planner: &Planner, row: &MigrationRow) -> Move {
    let stuck = view::stuck(row, &planner.live.seen(row.migration.id));
    let undecided =
        matches!(&row.migration.phase, Phase::Failed { cleanup: Cleanup::Undecided, .. });
    Move {
        id: row.migration.id,
        vm: row.migration.vm,
        ended: row.ended_us.map(|at| Timestamp(at / 1000)),
        stuck: stuck.map(|stuck| (stuck.cause, stuck.waits_for)).or_else(|| {
            let cause = row.migration.phase.cause().filter(|_| undecided)?;
            Some((cause.to_string(), "a human".to_owned()))
        }),
        undecided,
    }
}

fn waits(of: &Queued, now: Timestamp) -> Waits {
    let (vm, what) = match &of.row {
        Row::Migration(row) => (row.migration.vm, "migration"),
        Row::Start(start) => (start.vm, "start"),
    };
    let told = told(&of.waiting, &of.place, now);
    let words = match of.waiting.blocked_since {
        Some(since) => format!("since {}: {told}", clock::rfc3339(since)),
        None => told,
    };
    Waits { id: of.row.id(), vm, what, words }
}

fn of_vm(row: &VmRow, open: &BTreeSet<MigrationId>, queued: &BTreeSet<MigrationId>) -> Known {
    Known {
        id: row.id,
        name: row.name.clone(),
        host: row.host.clone(),
        power: row.power,
        generation: row.generation,
        claim: row.claim,
        under: match row.admission {
            None => Under::Nothing,
            Some(id) if open.contains(&id) => Under::Migration(id),
            Some(id) if queued.contains(&id) => Under::Queued(id),
            Some(id) => Under::Power(id),
        },
        error: row.error.clone(),
    }
}

fn answered(row: &HostRow, report: &v1::HostReport) -> HostSaid {
    let answer = match (report.journal_unreadable, report.learning) {
        (true, _) => Answer::Unreadable,
        (false, true) => Answer::Learning,
        (false, false) => Answer::Whole,
    };
    // Whoever answers is under the boot that it says, whatever the store knows yet.
    let now = HostRow { boot_id: report.boot_id.clone(), ..row.clone() };
    HostSaid {
        id: row.id.clone(),
        answer,
        boot_id: report.boot_id.clone(),
        declared: declared(&now),
        vms: report.vms.iter().filter_map(remains).collect(),
        strangers: report.strangers.clone(),
        orphans: report.orphans.iter().map(orphan).collect(),
    }
}

fn silent(row: &HostRow, reason: String, heard: Option<Timestamp>) -> HostSaid {
    HostSaid {
        id: row.id.clone(),
        answer: Answer::Silent { reason, heard },
        boot_id: row.boot_id.clone(),
        declared: declared(row),
        vms: Vec::new(),
        strangers: Vec::new(),
        orphans: Vec::new(),
    }
}

fn declared(row: &HostRow) -> Option<Declared> {
    let declaration = row.declared_dead.as_ref()?;
    let standing = match Worth::of(row)? {
        Worth::Holds => Standing::Holds,
        Worth::History => Standing::History,
        Worth::Void => Standing::Void { at: declaration.void.unwrap_or(declaration.at) },
    };
    let (by, reason) = (declaration.by.clone(), declaration.reason.clone());
    Some(Declared { at: declaration.at, by, reason, standing })
}

fn orphan(message: &v1::Orphan) -> Orphan {
    let name = if message.vm_name.is_empty() { &message.vm_id } else { &message.vm_name };
    Orphan {
        vm: message.vm_id.parse().ok(),
        name: name.clone(),
        kind: message.kind.clone(),
        detail: message.detail.clone(),
    }
}

/// Reads what a host has of a VM; `None` if it does not even name the VM.
fn remains(message: &v1::VmReport) -> Option<Remains> {
    let vm: VmId = message.vm_id.parse().ok()?;
    let role = Role::from_label(&message.role);
    let has_process = matches!(role, Some(Role::Running | Role::Held | Role::Receiver));
    let process = match (&message.gone, has_process) {
        (Some(gone), _) => Process::Gone(gone.ended.clone()),
        (None, true) => Process::Alive,
        (None, false) => Process::None,
    };
    // A word that this release does not know proves nothing.
    let knowledge = match (role, message.knowledge()) {
        (None, _) | (_, v1::Knowledge::Unspecified | v1::Knowledge::Unreadable) => {
            Knowledge::Unreadable
        }
        (Some(_), v1::Knowledge::Learning) => Knowledge::Learning,
        (Some(_), v1::Knowledge::Known) => Knowledge::Known,
        (Some(_), v1::Knowledge::Unresponsive) => Knowledge::Unresponsive,
        (Some(_), v1::Knowledge::UnknownVm) => Knowledge::UnknownVm,
    };
    Some(Remains {
        vm,
        name: message.vm_name.clone(),
        role: role.unwrap_or(Role::Absent),
        knowledge,
        process,
        run_state: RunState::from_qemu(&message.run_state),
        generation: Generation::from_stored(message.generation),
        claim: Claim::from_stored(message.claim),
        migration: message.migration_id.parse().ok(),
        handed: if message.handed && !message.gave_up { Handed::Yes } else { Handed::No },
        gave_up: if message.gave_up { GaveUp::Yes } else { GaveUp::No },
        continued: if message.ever_continued { Continued::Yes } else { Continued::No },
    })
}

/// Returns the hosts that did not say all that they have, and are not dead either.
#[must_use]
pub fn not_whole(picture: &Picture) -> Vec<HostId> {
    let unknown = |host: &&HostSaid| {
        let dead = host.declared.as_ref().is_some_and(|of| of.standing == Standing::Holds);
        host.answer != Answer::Whole && !dead
    };
    picture.hosts.iter().filter(unknown).map(|host| host.id.clone()).collect()
}

/// Says whether a host names a process of a VM, or cannot say that it has none.
#[must_use]
pub fn names_process(host: &HostSaid, vm: VmId) -> bool {
    host.vms.iter().filter(|there| there.vm == vm).any(|there| match &there.process {
        Process::Alive => true,
        Process::Gone(_) => false,
        Process::None => match there.knowledge {
            Knowledge::Known | Knowledge::UnknownVm => false,
            Knowledge::Learning | Knowledge::Unresponsive | Knowledge::Unreadable => true,
        },
    })
}
