//! Moves that are made at the hosts without a planner, as `vmferry runtime` makes them.
//!
//! Whoever makes one never gives up half-way: it is asked for in worlds whose hosts stay up.

use std::time::Duration;

use vmferry_planner_core::evidence::TransferState;
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{Generation, HostId, MigrationId, VmId};

use crate::agent::{Agent, Ask, Refusal, Tell};
use crate::host::short;
use crate::world::World;

/// How often what is not done yet is looked at again.
const LOOK: Duration = Duration::from_millis(200);

/// All that such a move may come to.
const EVERYTHING: [&str; 7] = [
    "arm_receiver",
    "start_transfer",
    "order_switchover",
    "cancel_transfer",
    "destroy_receiver",
    "continue_destination",
    "release_source",
];

/// One such move.
#[derive(Debug)]
struct ByHand {
    world: World,
    vm: VmId,
    migration: MigrationId,
    source: HostId,
    destination: HostId,
    generation: u64,
    claim: u64,
    step: u64,
    /// From the order on it goes on, whoever asks for something meanwhile.
    ordered: bool,
}

impl World {
    /// Moves a VM from wherever it runs, if its agent lends a claim for that.
    pub(crate) async fn move_by_hand(self, vm: VmId, destination: HostId) {
        let runs = self.with(|state| {
            // Where it runs, or where it did until it was handed over.
            let with_it = |host: &&HostId| {
                state.host(host).is_some_and(|there| {
                    there.qemus.values().any(|qemu| qemu.vm == vm && qemu.image != 0)
                })
            };
            state.hosts.keys().find(with_it).cloned()
        });
        let Some(source) = runs.filter(|source| *source != destination) else { return };
        // Nobody does the same twice at once.
        if !self.with(|state| state.by_hand.insert(vm)) {
            return;
        }
        let migration = self.with(|state| {
            let id = MigrationId::from_u128((1_u128 << 120) + u128::from(state.fresh()));
            state.owed.extend(EVERYTHING.map(|name| (id, name)));
            id
        });
        let lent = self.try_ask(&source, Ask::NextClaim(vm, migration)).await;
        let Some(Ok(Tell::Observation(seen))) = lent else {
            self.note(|| format!("no claim is lent for {}", short(vm)));
            return;
        };
        self.note(|| format!("{} is moved by hand from {source} to {destination}", short(vm)));
        let mut by_hand = ByHand {
            world: self,
            vm,
            migration,
            source,
            destination,
            generation: seen.generation,
            claim: seen.claim,
            step: 0,
            ordered: false,
        };
        if let Err(refusal) = by_hand.carry_out().await {
            let world = &by_hand.world;
            world.note(|| format!("by hand: {} {}", refusal.detail.code, refusal.message));
        }
    }

    async fn try_ask(&self, host: &HostId, ask: Ask) -> Option<Result<Tell, Refusal>> {
        let agent: Agent = self.agent(host)?;
        agent.answer(ask).await
    }
}

impl ByHand {
    async fn carry_out(&mut self) -> Result<(), Refusal> {
        self.claim_destination().await?;
        let arm = Action::ArmReceiver(v1::ArmReceiver::default());
        let Some(listener) = self.command(Side::Destination, arm).await?.listener else {
            return Ok(());
        };
        let start = v1::StartTransfer { listener: Some(listener), ..v1::StartTransfer::default() };
        if let Err(refusal) = self.command(Side::Source, Action::StartTransfer(start)).await {
            self.back().await?;
            return Err(refusal);
        }
        let stands = [TransferState::PreSwitchover];
        if !self.wait(Side::Source, &stands).await? {
            return self.back().await;
        }
        self.ordered = true;
        let order = Action::OrderSwitchover(v1::OrderSwitchover {});
        if self.command(Side::Source, order).await.is_err() {
            return self.back().await;
        }
        let done = [TransferState::Completed];
        if !self.wait(Side::Source, &done).await? || !self.wait(Side::Destination, &done).await? {
            return Ok(());
        }
        self.generation += 1;
        self.world.with(|state| {
            state.gives_out(self.vm, Generation::from_stored(self.generation));
        });
        let go_on = Action::ContinueDestination(v1::ContinueDestination {});
        self.command(Side::Destination, go_on).await?;
        let release = Action::ReleaseSource(v1::ReleaseSource::default());
        self.command(Side::Source, release).await.map(|_| ())
    }

    /// Takes another claim, at both ends: somebody asked for something meanwhile.
    async fn claim_anew(&mut self) -> Result<(), Refusal> {
        let again = Ask::NextClaim(self.vm, self.migration);
        if let Tell::Observation(seen) = self.ask(&self.source, again).await? {
            self.claim = self.claim.max(seen.claim);
        }
        self.claim_destination().await
    }

    async fn claim_destination(&self) -> Result<(), Refusal> {
        let claim = v1::ClaimRequest {
            vm_id: self.vm.to_string(),
            migration_id: self.migration.to_string(),
            generation: self.generation,
            claim: self.claim,
            hold_limit_ms: 0,
        };
        self.ask(&self.destination, Ask::Claim(claim)).await.map(|_| ())
    }

    /// Clears away at each end what its agent still lets it.
    async fn back(&mut self) -> Result<(), Refusal> {
        let cause = "by hand".to_owned();
        let cancel = Action::CancelTransfer(v1::CancelTransfer { cause: cause.clone() });
        let destroy = Action::DestroyReceiver(v1::DestroyReceiver { cause, source_gone: None });
        for (side, action) in [(Side::Source, cancel), (Side::Destination, destroy)] {
            let again = Ask::NextClaim(self.vm, self.migration);
            let Ok(Tell::Observation(seen)) = self.ask(self.host(side), again).await else {
                continue;
            };
            self.claim = seen.claim;
            if let Err(refusal) = self.command(side, action).await {
                self.world.note(|| format!("by hand: {}", refusal.message));
            }
        }
        Ok(())
    }

    const fn host(&self, side: Side) -> &HostId {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }

    /// Waits for one of some states; `false` if another one has ended the transfer.
    async fn wait(&mut self, side: Side, wanted: &[TransferState]) -> Result<bool, Refusal> {
        loop {
            let look = v1::ObserveRequest { vm_id: self.vm.to_string(), claim: self.claim };
            let told = self.ask(self.host(side), Ask::Observe(look)).await?;
            let Tell::Observation(seen) = told else { return Ok(false) };
            if seen.claim != self.claim {
                if !self.ordered {
                    return Ok(false);
                }
                self.claim_anew().await?;
            }
            let status = seen.transfer.map(|transfer| transfer.status).unwrap_or_default();
            let state = TransferState::from_agent(&status);
            if wanted.contains(&state) {
                return Ok(true);
            }
            if matches!(state, TransferState::Failed | TransferState::Cancelled) || seen.gave_up {
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn command(&mut self, side: Side, action: Action) -> Result<v1::ExecuteReply, Refusal> {
        loop {
            // Whoever was refused asks anew.
            self.step += 1;
            let fence = v1::Fence {
                vm_id: self.vm.to_string(),
                migration_id: self.migration.to_string(),
                generation: self.generation,
                claim: self.claim,
                step: self.step,
            };
            let request = v1::ExecuteRequest { fence: Some(fence), action: Some(action.clone()) };
            let told = self.unless_silent(self.host(side), Ask::Execute(Box::new(request))).await;
            match told {
                Err(refusal) if not_yet(&refusal) => tokio::time::sleep(LOOK).await,
                Err(refusal) if self.ordered && refusal.detail.code == "stale_claim" => {
                    self.claim_anew().await?;
                    tokio::time::sleep(LOOK).await;
                }
                Err(refusal) => return Err(refusal),
                Ok(Tell::Reply(reply)) => return Ok(*reply),
                Ok(Tell::Observation(_) | Tell::Description(_) | Tell::Check(_)) => {
                    return Ok(v1::ExecuteReply::default());
                }
            }
        }
    }

    /// Asks until the agent answers or refuses.
    async fn unless_silent(&self, host: &HostId, ask: Ask) -> Result<Tell, Refusal> {
        loop {
            if let Some(told) = self.world.try_ask(host, ask.clone()).await {
                return told;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Asks until the agent answers.
    async fn ask(&self, host: &HostId, ask: Ask) -> Result<Tell, Refusal> {
        loop {
            match self.world.try_ask(host, ask.clone()).await {
                Some(Err(refusal)) if not_yet(&refusal) => {}
                Some(told) => return told,
                None => {}
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn not_yet(refusal: &Refusal) -> bool {
    matches!(refusal.detail.code.as_str(), "learning" | "unresponsive" | "internal")
}

#[derive(Clone, Copy)]
enum Side {
    Source,
    Destination,
}
