//! Mending the channel between the halves of a divided guest (rule R6).
//!
//! The destination's main loop may wait for a page of its own guest: all that is said to it goes out
//! of band. Both commands may come again, and each makes its half see the break first.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use vmferry_agent_core::journal::{Order, Part};
use vmferry_agent_core::outgoing::Sending;
use vmferry_proto::v1;
use vmferry_qmp::MigrationStatus;
use vmferry_qmp::command::{Migrate, MigratePause, MigrateRecover, Yank, YankInstance};
use vmferry_types::Fence;

use super::{Outcome, transfer};
use crate::agent::Agent;
use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::Sight;
use crate::observer::sending_of;

/// How long an out-of-band command may take. It takes a tenth of a millisecond.
const OOB: Duration = Duration::from_secs(2);
/// How long a half may take to see by itself that the channel is broken, before it is made to: the
/// last of what had been sent may still be arriving.
const NOTICES: Duration = Duration::from_secs(2);
/// How long a half that was made to see it may take to say so.
const PAUSES: Duration = Duration::from_secs(3);
/// How long the way to the other half may take to answer.
const KNOCK: Duration = Duration::from_secs(1);
/// How long both halves may take to go on.
const MENDS: Duration = Duration::from_secs(3);
/// How many ports are tried.
const PORT_TRIES: usize = 8;

/// Where the destination's half waits, for as long as this is kept.
#[derive(Debug)]
pub(crate) struct Waiting {
    agent: Arc<Agent>,
    listener: v1::Listener,
    doorbell: tokio::task::JoinHandle<()>,
    ports: [u16; 2],
}

impl Waiting {
    pub(crate) fn listener(&self) -> v1::Listener {
        self.listener.clone()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.doorbell.abort();
        for port in self.ports {
            self.agent.give_port_back(port);
        }
    }
}

/// Makes the destination's half wait at a new port.
pub(super) async fn recover(lane: &mut Lane, fence: &Fence) -> Result<Outcome, CommandError> {
    check_half(lane, fence)?;
    if let Some(listener) = lane.shared.waits_at() {
        return Ok(Outcome { listener: Some(listener), ..Outcome::default() });
    }
    lane.persist().await?;
    see_the_break(lane).await?;
    let (port, kept) = bind(&lane.agent).await?;
    let (bell, doorbell) = match bind(&lane.agent).await {
        Ok(bound) => bound,
        Err(error) => {
            lane.agent.give_port_back(port);
            return Err(error);
        }
    };
    // Only tried: QEMU binds it itself.
    drop(kept);
    let address = lane.agent.config.migration_address;
    let waiting = Waiting {
        agent: lane.agent.clone(),
        listener: v1::Listener {
            address: address.to_string(),
            port: u32::from(port),
            postcopy: true,
            preempt: false,
            doorbell: u32::from(bell),
        },
        doorbell: lane.agent.shutdown.spawn(answer(doorbell)),
        ports: [port, bell],
    };
    let uri = format!("tcp:{}", SocketAddr::new(address, port));
    lane.oob(MigrateRecover { uri }, OOB).await?;
    let listener = waiting.listener();
    tracing::info!(port, "half of the guest waits for the other");
    lane.shared.wait_at(waiting);
    Ok(Outcome { listener: Some(listener), ..Outcome::default() })
}

/// Refuses where no half of this migration's guest is.
fn check_half(lane: &Lane, fence: &Fence) -> Result<(), CommandError> {
    let ours = match &lane.record.part {
        Part::Receiver { incoming, .. } => incoming.migration == fence.migration,
        Part::Running { process, .. } => process.admission == fence.migration,
        Part::Absent | Part::Stopped { .. } => false,
    };
    let sight = lane.shared.sight.borrow();
    if let Some(gone) = &sight.gone {
        return Err(CommandError::ReceiverGone(format!("{} {}", gone.ended, gone.stderr_tail)));
    }
    let divided = sight.migrate.status.as_ref().is_some_and(MigrationStatus::postcopy);
    if ours && divided {
        return Ok(());
    }
    Err(CommandError::wrong_state("no guest is here whose memory follows"))
}

/// Waits until this half sees that the channel is broken; makes it see that in the end.
async fn see_the_break(lane: &Lane) -> Result<(), CommandError> {
    if lane.shared.wait(NOTICES, sees_no_channel).await.is_err() {
        tracing::info!("the channel is forced to break");
        lane.oob(MigratePause {}, OOB).await?;
    }
    let sight = lane.shared.wait(PAUSES, sees_no_channel).await.unwrap_or_else(|sight| sight);
    if sight.migrate.status == Some(MigrationStatus::PostcopyPaused) {
        return Ok(());
    }
    Err(CommandError::wrong_state(format!(
        "there is no channel to be mended: {}",
        sight.migrate.status.as_ref().map_or("nothing", |status| status.label())
    )))
}

/// Says whether this half says that its channel is broken, or needs none any more.
fn sees_no_channel(sight: &Sight) -> bool {
    let over = sight.migrate.status.as_ref().is_none_or(|status| !status.postcopy());
    sight.gone.is_some() || over || sight.migrate.status == Some(MigrationStatus::PostcopyPaused)
}

/// Takes a port that nobody has.
async fn bind(agent: &Arc<Agent>) -> Result<(u16, TcpListener), CommandError> {
    for _ in 0..PORT_TRIES {
        let Some(port) = agent.take_port() else { break };
        let address = SocketAddr::new(agent.config.migration_address, port);
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok((port, listener)),
            Err(error) => {
                tracing::debug!(%address, %error, "port is in use");
                agent.give_port_back(port);
            }
        }
    }
    Err(CommandError::wrong_state("every port of migration.ports is in use; widen the range"))
}

/// Lets anybody see that there is a way.
async fn answer(doorbell: TcpListener) {
    loop {
        match doorbell.accept().await {
            Ok(knocked) => drop(knocked),
            // Out of descriptors, most likely; whoever knocks does so again.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Lets the source go on serving.
pub(super) async fn resume(
    lane: &mut Lane,
    resume: &v1::ResumeTransfer,
) -> Result<Outcome, CommandError> {
    let uri = transfer::uri("resume_transfer.listener", resume.listener.as_ref())?;
    let process = lane.process()?;
    let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
    let handed = lane.record.outgoing().is_some_and(|sent| sent.order == Order::Handed);
    if handed && sending == Sending::Complete {
        return Ok(Outcome::default());
    }
    if !handed || !sending.divided() {
        return Err(CommandError::wrong_state("no guest left here whose memory follows"));
    }
    knock(resume.listener.as_ref()).await?;
    lane.persist().await?;
    see_the_break(lane).await?;
    process
        .monitor()
        .execute(Migrate { uri, resume: Some(true) })
        .await
        .map_err(|error| CommandError::failed("go on serving the guest's memory", &error))?;
    let flows = |sight: &Sight| {
        let status = sight.migrate.status.as_ref();
        sight.gone.is_some()
            || status == Some(&MigrationStatus::PostcopyActive)
            || status.is_none_or(|status| !status.postcopy())
    };
    // What came of it is observed; it may break again at once.
    if lane.shared.wait(MENDS, flows).await.is_err() {
        tracing::warn!("the channel is not mended yet");
    }
    Ok(Outcome::default())
}

/// Looks whether there is a way to the other half: QEMU itself would wait two minutes for one, and
/// could not be told to stop.
async fn knock(listener: Option<&v1::Listener>) -> Result<(), CommandError> {
    let bell = listener.and_then(|at| u16::try_from(at.doorbell).ok()).unwrap_or(0);
    let address = listener.and_then(|at| at.address.parse::<IpAddr>().ok());
    let (Some(address), true) = (address, bell != 0) else { return Ok(()) };
    let address = SocketAddr::new(address, bell);
    let failed = |cause: String| {
        CommandError::wrong_state(format!(
            "there is no way to the other half of the guest at {address}: {cause}"
        ))
    };
    match timeout(KNOCK, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed(format!("no answer within {KNOCK:?}"))),
    }
}

/// Forces the channel of a source to break that has sent nothing for too long, by the agent's own
/// word: QEMU detects no stall, and TCP rides a cut out for a quarter of an hour.
pub(crate) async fn force(lane: &Lane) -> Result<(), CommandError> {
    let sending = sending_of(lane.record.sent(), &lane.shared.sight.borrow());
    if sending.divided() {
        if sending != Sending::Broken {
            lane.oob(MigratePause {}, OOB).await?;
        }
        return Ok(());
    }
    if sending == Sending::Switching {
        // It hangs in a send of the last, and the main loop with it. Stopped before, its guest stays
        // so; whether it has left by then, QEMU says.
        lane.oob(Yank { instances: vec![YankInstance::migration()] }, OOB).await?;
    }
    Ok(())
}
