//! Taking up what a planner knows of this host's VMs.
//!
//! A host whose journal is new or was lost proves nothing (rule R3). A planner that is told so
//! answers with every VM that is this host's or under way, and only once all of them are on the
//! disk the journal counts again. An agent that dies in the middle of that begins anew.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmferry_agent_core::journal::VmRecord;
use vmferry_proto::v1;
use vmferry_types::{Claim, Generation, Role, VmId};

use crate::agent::Agent;
use crate::clock;
use crate::error::{CommandError, chain};
use crate::journal::Journal;
use crate::told::Owner;
use crate::vm::VmHandle;

/// Takes up a planner's answer to a report.
pub(crate) async fn take_up(
    agent: &Arc<Agent>,
    report: &v1::HostReport,
    generations: Vec<v1::VmGeneration>,
) {
    // Two planners may answer at once.
    let _one_at_a_time = agent.seeding.lock().await;
    let named: BTreeMap<VmId, v1::VmGeneration> = generations
        .into_iter()
        .filter_map(|owned| Some((owned.vm_id.parse().ok()?, owned)))
        .collect();
    hear(agent, report, &named);
    if let Err(error) = seed(agent, report, &named).await {
        tracing::error!(%error, "cannot take up what the planner knows");
    }
    agent.told().retain(|vm| agent.vm(vm).is_some());
}

/// Remembers who owns what.
fn hear(agent: &Agent, report: &v1::HostReport, named: &BTreeMap<VmId, v1::VmGeneration>) {
    let now = clock::monotonic();
    let mut told = agent.told();
    for (vm, owned) in named {
        let owner = match owned.host_id.as_str() {
            "" => Owner::Unplaced,
            host if host == agent.config.host_id.as_str() => Owner::Here,
            host => Owner::Elsewhere(host.to_owned()),
        };
        let (generation, claim) = counters(owned);
        told.hear(*vm, owner, (generation, claim), now);
    }
    // What was not known for certain when it was told, no planner could answer for.
    for vm in report.vms.iter().filter(|vm| certain(report, vm)) {
        if let Ok(id) = vm.vm_id.parse::<VmId>()
            && !named.contains_key(&id)
        {
            told.hear_nothing(id, now);
        }
    }
}

/// Says whether a planner that knows a VM would have named it in its answer.
fn certain(report: &v1::HostReport, vm: &v1::VmReport) -> bool {
    let known = match vm.knowledge() {
        v1::Knowledge::Known | v1::Knowledge::Unresponsive | v1::Knowledge::Unreadable => true,
        v1::Knowledge::Unspecified | v1::Knowledge::Learning | v1::Knowledge::UnknownVm => false,
    };
    known && !report.learning && vm.role != Role::Absent.label()
        || vm.knowledge() == v1::Knowledge::Unreadable
}

fn counters(owned: &v1::VmGeneration) -> (Generation, Claim) {
    (Generation::from_stored(owned.generation), Claim::from_stored(owned.claim))
}

async fn seed(
    agent: &Arc<Agent>,
    report: &v1::HostReport,
    named: &BTreeMap<VmId, v1::VmGeneration>,
) -> Result<(), CommandError> {
    for vm in agent.vms().into_iter().filter(VmHandle::unreadable_vm) {
        if let Some(owned) = named.get(&vm.shared.id) {
            reseed_broken(agent, &vm, counters(owned)).await?;
        }
    }
    // Only who was told that the journal proves nothing names all that it has to know again.
    if agent.journal_proves() || !report.journal_unreadable {
        return Ok(());
    }
    // Those of other hosts as well: an old command for one of them may still be under way to here.
    for (vm, owned) in named {
        let (generation, claim) = counters(owned);
        agent.vm_or_new(*vm).seed(generation, claim).await?;
    }
    Journal::mark_kept(&agent.config.state_dir, &agent.config.host_id).map_err(|error| {
        CommandError::Failed { operation: "mark the journal as kept", cause: chain(&error) }
    })?;
    tracing::info!(vms = named.len(), "journal is seeded by the planner");
    agent.trust_journal();
    Ok(())
}

/// Replaces a broken record, if no QEMU of that VM runs here.
async fn reseed_broken(
    agent: &Arc<Agent>,
    vm: &VmHandle,
    (generation, claim): (Generation, Claim),
) -> Result<(), CommandError> {
    let id = vm.shared.id;
    crate::report::look_for_strangers(agent).await;
    if agent.stranger_of(id).is_some() {
        // Its process was launched by this agent once; what it is cannot be known any more.
        return Ok(());
    }
    agent.journal.set_aside(id).map_err(|error| CommandError::Failed {
        operation: "set a broken record aside",
        cause: chain(&error),
    })?;
    let fresh = VmHandle::known(agent, VmRecord::new(id));
    agent.register(fresh.clone());
    fresh.seed(generation, claim).await
}
