//! Mistakes of planners, made on purpose: commands that no row owes yet, or that what was heard
//! forbids.
//!
//! They leave a planner beside its real commands, since the real driver does not make them.

use std::time::Duration;

use vmferry_planner::store::{Change, MigrationRow};
use vmferry_planner_core::migration::{Phase, Switchover};
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_proto::v1::{ExecuteRequest, ObserveRequest, VmObservation};
use vmferry_types::HostId;

use crate::agent::Ask;
use crate::bugs::Bug;
use crate::life::Life;
use crate::network::{Passage, SimAgents};
use crate::world::{Place, World};

/// A step that no driver comes to by itself.
const FAR: u64 = 1_000;

impl World {
    /// Sends a command that nobody owes.
    fn blunder(&self, from: Place, host: HostId, request: ExecuteRequest, after: Duration) {
        let passage = Passage::plain(after);
        self.carry(from, host, Ask::Execute(Box::new(request)), passage, None);
    }

    /// Finds the row that a fence names.
    fn row_of(&self, fence: &v1::Fence) -> Option<MigrationRow> {
        self.with(|state| {
            let mut rows = state.tables.migrations.values();
            rows.find(|row| row.migration.id.to_string() == fence.migration_id).cloned()
        })
    }
}

impl SimAgents {
    /// What a planner does wrong where it commands.
    pub(crate) fn mistaken_command(&self, request: &ExecuteRequest) {
        let world = &self.life.world;
        let bug = world.with(|state| state.bug.filter(|bug| state.bugged(*bug)));
        let from = Place::Planner(self.life.number);
        let Some(mut fence) = request.fence.clone() else { return };
        match (bug, &request.action) {
            // An order is as good as a commit.
            (Some(Bug::PlannerContinuesEarly), Some(Action::OrderSwitchover(_))) => {
                let row = world.row_of(&fence);
                let Some(host) = row.and_then(|row| row.migration.destination().cloned()) else {
                    return;
                };
                fence.generation += 1;
                fence.step += 1;
                let action = Some(Action::ContinueDestination(v1::ContinueDestination {}));
                let early = ExecuteRequest { fence: Some(fence), action };
                world.blunder(from, host, early, Duration::from_millis(60));
            }
            // Whoever is told to end has ended.
            (Some(Bug::PlannerResumesEarly), Some(Action::DestroyReceiver(_))) => {
                let Some(row) = world.row_of(&fence) else { return };
                let destination = row.migration.destination().map(ToString::to_string);
                let proof = v1::GoneProof {
                    kind: v1::ProofKind::ExitRecord.into(),
                    host_id: destination.unwrap_or_default(),
                    ..v1::GoneProof::default()
                };
                let resume = v1::ResumeSource { receiver_gone: Some(proof) };
                let action = Some(Action::ResumeSource(resume));
                let early = ExecuteRequest { fence: Some(fence), action };
                world.blunder(from, row.migration.source, early, Duration::ZERO);
            }
            (Some(_) | None, _) => {}
        }
    }

    /// A planner that hears that the source is gone clears the destination away, whatever that has.
    pub(crate) fn mistaken_hearing(&self, seen: &VmObservation) {
        let world = &self.life.world;
        let clears = world.with(|state| state.bugged(Bug::PlannerDestroysBlindly));
        if !clears || seen.gone.is_none() || seen.role == "receiver" {
            return;
        }
        let fence = v1::Fence {
            vm_id: seen.vm_id.clone(),
            migration_id: seen.migration_id.clone(),
            generation: seen.generation,
            claim: seen.claim,
            step: FAR,
        };
        let Some(row) = world.row_of(&fence).filter(|row| row.ended_us.is_none()) else { return };
        let Some(host) = row.migration.destination().cloned() else { return };
        if row.migration.source.as_str() != seen.host_id {
            return;
        }
        let cause = "the source is gone".to_owned();
        let action =
            Some(Action::DestroyReceiver(v1::DestroyReceiver { cause, source_gone: None }));
        world.with(|state| {
            let at = state.at_ms();
            state.sent.insert((row.migration.vm, row.claim.value(), FAR), at + 1);
        });
        let blind = ExecuteRequest { fence: Some(fence), action };
        world.blunder(Place::Planner(self.life.number), host, blind, Duration::from_millis(2));
    }
}

impl Life {
    /// What a planner does wrong around a commit: acts before it, or on it alone.
    pub(crate) async fn mistaken_commit(&self, before: &MigrationRow, changes: &[Change]) {
        let bug = self.world.with(|state| state.bug.filter(|bug| state.bugged(*bug)));
        let Some(after) = changes.last().map(|change| &change.after) else { return };
        let action = match (bug, &after.phase) {
            (
                Some(Bug::PlannerKillsUndecided),
                Phase::Captured { switchover: Switchover::Forward, .. },
            ) => Action::KillSource(v1::KillSource { cause: "overdue".to_owned() }),
            (Some(Bug::PlannerReleasesEarly), Phase::Committed { .. }) => {
                Action::ReleaseSource(v1::ReleaseSource::default())
            }
            (Some(_) | None, _) => return,
        };
        let fence = v1::Fence {
            vm_id: after.vm.to_string(),
            migration_id: after.id.to_string(),
            generation: after.books().generation.value(),
            claim: before.claim.value(),
            step: FAR,
        };
        let request = ExecuteRequest { fence: Some(fence), action: Some(action) };
        let from = Place::Planner(self.number);
        self.world.blunder(from, after.source.clone(), request, Duration::ZERO);
        if bug == Some(Bug::PlannerKillsUndecided) {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

/// What a planner makes of an agent that does not answer, if it takes silence for death.
pub(crate) fn taken_for_dead(host: &HostId, request: &ObserveRequest) -> VmObservation {
    VmObservation {
        host_id: host.to_string(),
        vm_id: request.vm_id.clone(),
        boot_id: "unheard".to_owned(),
        claim: request.claim,
        knowledge: v1::Knowledge::Known.into(),
        role: "absent".to_owned(),
        gone: Some(v1::GoneProof {
            kind: v1::ProofKind::ProcessAbsent.into(),
            host_id: host.to_string(),
            ..v1::GoneProof::default()
        }),
        ..VmObservation::default()
    }
}
