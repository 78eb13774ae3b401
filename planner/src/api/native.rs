//! Migrations that wait at gates for an operator's word.

use std::sync::Arc;

use vmferry_planner_core::migration::{
    Event, Gate, GatePoint, Migration, Phase, Stage, Switchover,
};
use vmferry_proto::v1;
use vmferry_types::{HostId, VmId};

use super::{ApiError, migration_id};
use crate::planner::Planner;
use crate::store::{Filter, MigrationRow, OnlyOpen};
use crate::telemetry::Chain;
use crate::view;

/// What an operator lets a migration pass.
#[derive(Clone, Copy, Debug)]
enum Word {
    /// The gate that it waits at.
    One(GatePoint),
    /// All that are left, once the guest's memory has crossed.
    All,
}

impl Planner {
    /// Begins a migration that waits wherever it can.
    ///
    /// # Errors
    ///
    /// As [`migrate_vm`](Self::migrate_vm).
    pub async fn prepare_receiver(
        self: &Arc<Self>,
        mut asked: v1::MigrateVmRequest,
    ) -> Result<v1::Migration, ApiError> {
        if asked.gates.is_empty() {
            asked.gates = GatePoint::ALL.map(|at| at.label().to_owned()).to_vec();
        }
        self.migrate_vm(asked).await
    }

    /// Lets a migration pass a gate. One that has passed it already is answered as it is.
    ///
    /// # Errors
    ///
    /// Says so if it has not come to the gate yet, or never will.
    pub async fn open_gate(
        self: &Arc<Self>,
        asked: &v1::OpenGateRequest,
    ) -> Result<v1::Migration, ApiError> {
        let word = word(&asked.gate)?;
        let id = if asked.id.is_empty() {
            self.newest_row(&asked.vm).await?.migration.id
        } else {
            migration_id(&asked.id)?
        };
        self.tell(id, |migration| said(migration, word)).await
    }

    /// Shows the newest migration of a VM.
    ///
    /// # Errors
    ///
    /// Fails if there is no such VM, or if it never moved.
    pub async fn newest_migration(&self, vm: &str) -> Result<v1::Migration, ApiError> {
        view::migration(self, &self.newest_row(vm).await?).await
    }

    async fn newest_row(&self, vm: &str) -> Result<MigrationRow, ApiError> {
        let id = self.resolve_vm("vm", vm).await?.id;
        let none = || ApiError::NotFound { kind: "migration of VM", name: vm.to_owned() };
        self.newest_of(id).await?.ok_or_else(none)
    }

    async fn newest_of(&self, vm: VmId) -> Result<Option<MigrationRow>, ApiError> {
        let newest = Filter { vm: Some(vm), open: OnlyOpen::All, limit: 1 };
        Ok(self.store().migrations(&newest).await?.pop())
    }

    /// Asks both hosts what they have of a VM's ports.
    ///
    /// # Errors
    ///
    /// Fails if there is no such VM; a host that does not say is named in the answer.
    pub async fn network_state(
        &self,
        asked: &v1::NetworkStateRequest,
    ) -> Result<v1::NetworkState, ApiError> {
        let vm = self.resolve_vm("vm", &asked.vm).await?;
        let newest = self.newest_of(vm.id).await?;
        let destination = newest.as_ref().and_then(|row| row.migration.destination().cloned());
        let source = newest.as_ref().map(|row| row.migration.source.clone()).or(vm.host);
        let (source, destination) = tokio::join!(
            self.ports(source, "source", vm.id),
            self.ports(destination, "destination", vm.id)
        );
        Ok(v1::NetworkState {
            vm_id: vm.id.to_string(),
            vm_name: vm.name,
            migration_id: newest.map(|row| row.migration.id.to_string()).unwrap_or_default(),
            hosts: source.into_iter().chain(destination).collect(),
        })
    }

    async fn ports(
        &self,
        host: Option<HostId>,
        side: &'static str,
        vm: VmId,
    ) -> Option<v1::HostPorts> {
        let host = host?;
        let mut said = v1::HostPorts {
            host: host.to_string(),
            side: side.to_owned(),
            ..v1::HostPorts::default()
        };
        match self.parts.agents.describe_ports(&host, vm).await {
            Ok(ports) => said.ports = Some(ports),
            Err(error) => said.error = Chain(&error).to_string(),
        }
        Some(said)
    }
}

fn word(gate: &str) -> Result<Word, ApiError> {
    match gate {
        "all" => Ok(Word::All),
        label => GatePoint::from_label(label).map(Word::One).ok_or_else(|| ApiError::Invalid {
            field: "gate",
            problem: format!("`{label}` is none of start, switchover, commit, all"),
        }),
    }
}

/// Returns what an operator's word means for a migration as it is; `None` if it is past that.
fn said(migration: &Migration, word: Word) -> Result<Option<Event>, ApiError> {
    let wrong = |why: String| ApiError::NotAtGate { migration: migration.id, why };
    if let Some(cause) = migration.phase.cause() {
        return Err(wrong(format!("it goes back, or has ended: {cause}")));
    }
    match word {
        Word::One(point) => {
            if let Some(event) = migration.opens(point) {
                return Ok(Some(event));
            }
            if migration.terms.gates.at(point) == Gate::Open {
                return Err(wrong(format!("it does not wait at the {point} gate, which is open")));
            }
            if is_past(&migration.phase, point) {
                return Ok(None);
            }
            Err(wrong(format!(
                "it is {} and has not come to the {point} gate yet",
                migration.label()
            )))
        }
        Word::All if is_past(&migration.phase, GatePoint::Commit) => Ok(None),
        Word::All if at_switchover(&migration.phase) => Ok(Some(Event::GatesOpened)),
        Word::All => Err(wrong(format!(
            "it is {}: the guest's memory has not crossed yet",
            migration.label()
        ))),
    }
}

/// Whether the guest stands still with nothing but the rest to follow.
const fn at_switchover(phase: &Phase) -> bool {
    match phase {
        Phase::Captured { switchover, .. } => match switchover {
            Switchover::Held { .. } | Switchover::Down { .. } => false,
            Switchover::Withheld | Switchover::Ordered | Switchover::Forward => true,
        },
        Phase::Restored { .. } => true,
        Phase::Queued { .. }
        | Phase::Admitted { .. }
        | Phase::Committed { .. }
        | Phase::Attached { .. }
        | Phase::Done { .. }
        | Phase::RollingBack { .. }
        | Phase::Aborted { .. }
        | Phase::Failed { .. } => false,
    }
}

/// Whether a migration in this phase, which goes forward, has passed a gate.
const fn is_past(phase: &Phase, point: GatePoint) -> bool {
    match (phase, point) {
        (Phase::Committed { .. } | Phase::Attached { .. } | Phase::Done { .. }, _) => true,
        (Phase::Admitted { stage: Stage::Arming | Stage::Waiting { .. }, .. }, _)
        | (
            Phase::Queued { .. }
            | Phase::RollingBack { .. }
            | Phase::Aborted { .. }
            | Phase::Failed { .. },
            _,
        )
        | (
            Phase::Admitted { .. }
            | Phase::Captured { switchover: Switchover::Held { .. } | Switchover::Withheld, .. },
            GatePoint::Switchover | GatePoint::Commit,
        )
        | (Phase::Captured { .. } | Phase::Restored { .. }, GatePoint::Commit) => false,
        (
            Phase::Admitted { .. } | Phase::Captured { .. } | Phase::Restored { .. },
            GatePoint::Start,
        )
        | (Phase::Captured { .. } | Phase::Restored { .. }, GatePoint::Switchover) => true,
    }
}
