//! Streams of observations.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::Status;
use vmferry_proto::v1;
use vmferry_types::VmId;

use crate::agent::Agent;
use crate::observe;
use crate::vm::VmHandle;

/// How often an observation is sent while data crosses, whatever changes.
const BUSY: Duration = Duration::from_millis(250);
/// How often one is sent while nothing happens, so that both ends notice a broken stream.
const IDLE: Duration = Duration::from_secs(5);

/// Sends observations of a VM until nobody listens.
pub(crate) async fn run(
    agent: Arc<Agent>,
    vm: VmId,
    listener: mpsc::Sender<Result<v1::VmObservation, Status>>,
) {
    tokio::select! {
        biased;
        () = listener.closed() => {}
        () = send(&agent, vm, &listener) => {}
    }
}

async fn send(
    agent: &Arc<Agent>,
    vm: VmId,
    listener: &mpsc::Sender<Result<v1::VmObservation, Status>>,
) {
    let mut registered = agent.registrations();
    loop {
        registered.mark_unchanged();
        let known = agent.vm(vm);
        let sent = match &known {
            Some(handle) => follow(agent, handle, listener).await,
            None => listener.send(Ok(observe::unknown(agent, vm))).await.is_ok(),
        };
        if !sent {
            return;
        }
        // It is not known yet, or its record was replaced.
        let waited = tokio::time::timeout(IDLE, registered.changed()).await;
        if matches!(waited, Ok(Err(_))) {
            return;
        }
    }
}

/// Follows a VM that is known; returns whether somebody still listens.
async fn follow(
    agent: &Arc<Agent>,
    handle: &VmHandle,
    listener: &mpsc::Sender<Result<v1::VmObservation, Status>>,
) -> bool {
    let shared = &handle.shared;
    let (mut record, mut sight) = (shared.record.subscribe(), shared.sight.subscribe());
    let mut registered = agent.registrations();
    loop {
        record.mark_unchanged();
        let busy = sight.borrow_and_update().busy();
        if listener.send(Ok(observe::observation(agent, shared))).await.is_err() {
            return false;
        }
        let pause = if busy { BUSY } else { IDLE };
        tokio::select! {
            biased;
            _ = sight.changed() => {}
            _ = record.changed() => {}
            _ = registered.changed() => {
                let same = agent.vm(shared.id).is_some_and(|now| Arc::ptr_eq(&now.shared, shared));
                if !same {
                    return true;
                }
            }
            () = tokio::time::sleep(pause) => {}
        }
    }
}
