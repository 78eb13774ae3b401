//! What is tried, case by case. Each ends in the invariants that [`Cluster::finish`] checks.

use std::time::Duration;

use anyhow::{Result, bail};
use futures::future::LocalBoxFuture;
use vmferry_proto::v1::{MigrateVmRequest, Migration};

use crate::accel::Accelerator;
use crate::client::End;
use crate::cluster::{Cluster, GuestVm};
use crate::guest::GuestKind;
use crate::pki::Wire;
use crate::planners::Store;

pub mod cancel;
pub mod cold;
pub mod crash;
pub mod death;
pub mod declared;
pub mod drain;
pub mod fence;
pub mod held;
pub mod hold;
pub mod hostile;
pub mod memory;
pub mod moves;
pub mod network;
pub mod partition;
pub mod postcopy;
pub mod records;
pub mod refusal;
pub mod runtime;
pub mod steps;
pub mod surface;
pub mod tls;

/// How long a move may take that nothing holds up, on a busy machine under TCG.
pub const MOVE_BOUND: Duration = Duration::from_secs(30);

/// How long a daemon may take to reach a fault point.
pub const POINT_BOUND: Duration = Duration::from_secs(45);

/// When a case is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// At every change: all of these together take minutes.
    Subset,
    /// Before a release, and at night.
    All,
}

/// What a case found worth telling, besides that it passed.
pub type Note = String;

type Body =
    Box<dyn for<'c, 'l> Fn(&'c mut Cluster<'l>) -> LocalBoxFuture<'c, Result<Note>> + Send + Sync>;

/// One thing that is tried.
pub struct Case {
    /// Its name: what is true when it passes.
    pub name: String,
    /// When it is run.
    pub tier: Tier,
    /// The guest that it runs, which decides the accelerator.
    pub guest: GuestKind,
    /// The accelerator that it is about; `None` for the best that runs the guest.
    pub accelerator: Option<Accelerator>,
    /// The hosts that it needs.
    pub hosts: &'static [&'static str],
    /// Where its planners keep what they hold to be true.
    pub store: Store,
    /// How its parts speak to each other.
    pub wire: Wire,
    /// What it does.
    pub body: Body,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("tier", &self.tier)
            .finish_non_exhaustive()
    }
}

impl Case {
    /// Makes a case on two hosts with the ROM guest.
    pub fn new<F>(name: impl Into<String>, tier: Tier, body: F) -> Self
    where
        F: for<'c, 'l> Fn(&'c mut Cluster<'l>) -> LocalBoxFuture<'c, Result<Note>>
            + Send
            + Sync
            + 'static,
    {
        Self {
            name: name.into(),
            tier,
            guest: GuestKind::Rom,
            accelerator: None,
            hosts: &["a", "b"],
            store: Store::Sqlite,
            wire: Wire::Tls,
            body: Box::new(body),
        }
    }

    /// Runs it with the Linux guest.
    #[must_use]
    pub fn with_linux(mut self) -> Self {
        self.guest = GuestKind::Linux;
        self
    }

    /// Runs it with one accelerator, whatever is best.
    #[must_use]
    pub fn under(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// Runs it with two planners on one PostgreSQL.
    #[must_use]
    pub fn on_postgres(mut self) -> Self {
        self.store = Store::Postgres;
        self
    }

    /// Runs it without certificates.
    #[must_use]
    pub fn in_plain_text(mut self) -> Self {
        self.wire = Wire::PlainText;
        self
    }

    /// Runs it on three hosts.
    #[must_use]
    pub fn on_three_hosts(mut self) -> Self {
        self.hosts = &["a", "b", "c"];
        self
    }
}

/// Returns every case, in the order in which they are run.
#[must_use]
pub fn all() -> Vec<Case> {
    let groups = [
        moves::cases(),
        tls::cases(),
        network::cases(),
        refusal::cases(),
        cancel::cases(),
        death::cases(),
        crash::cases(),
        crate::matrix::representatives(),
        declared::cases(),
        in_plain_text(drain::cases()),
        fence::cases(),
        hold::cases(),
        held::cases(),
        cold::cases(),
        partition::cases(),
        postcopy::cases(),
        records::cases(),
        runtime::cases(),
        steps::cases(),
        surface::cases(),
        in_plain_text(hostile::cases()),
        memory::cases(),
    ];
    groups.into_iter().flatten().collect()
}

/// Lets cases read and write by hand what is on the wire.
fn in_plain_text(cases: Vec<Case>) -> Vec<Case> {
    cases.into_iter().map(Case::in_plain_text).collect()
}

/// Asks for a migration and fails if it is refused.
pub(crate) async fn request(
    cluster: &Cluster<'_>,
    request: &MigrateVmRequest,
) -> Result<Migration> {
    match cluster.clients.migrate(request).await {
        Ok(migration) => Ok(migration),
        Err(status) => bail!("the migration was refused: {status}"),
    }
}

/// Waits for a migration to end as `end`, and proves that the VM then runs where it should.
async fn settle(cluster: &Cluster<'_>, vm: &GuestVm, id: &str, end: End) -> Result<Migration> {
    let migration = cluster.clients.expect_end(id, end, MOVE_BOUND).await?;
    match end {
        End::Done => {
            expect_record(&migration)?;
            cluster.expect_running(vm, &migration.target_host).await?;
        }
        End::Aborted => cluster.expect_running(vm, &migration.source_host).await?,
        End::Failed => {}
    }
    Ok(migration)
}

/// Moves a VM that nothing holds up.
pub(crate) async fn move_vm(cluster: &Cluster<'_>, vm: &GuestVm, host: &str) -> Result<Migration> {
    let migration = request(cluster, &crate::client::move_to(vm, host)).await?;
    let migration = settle(cluster, vm, &migration.id, End::Done).await?;
    if migration.target_host != host {
        bail!("the migration went to {} instead of {host}", migration.target_host);
    }
    Ok(migration)
}

/// Checks that the record of a completed migration tells the whole story.
fn expect_record(migration: &Migration) -> Result<()> {
    let entered: Vec<&str> = migration.phases.iter().map(|phase| phase.phase.as_str()).collect();
    let expected = ["admitted", "captured", "restored", "committed", "attached", "done"];
    let mut at = entered.iter();
    if let Some(missing) = expected.iter().find(|phase| !at.any(|entered| entered == *phase)) {
        bail!("the record has no {missing} in its place: {entered:?}");
    }
    if migration.state != "completed" || migration.progress_percent != 100 {
        bail!("the record says {} at {} %", migration.state, migration.progress_percent);
    }
    if migration.bytes_transferred == 0
        || migration.proof.is_empty()
        || migration.completed.is_empty()
    {
        bail!("the record lacks bytes, proof or time: {migration:?}");
    }
    Ok(())
}

/// Says how long the guest stood still, as seen from outside.
fn pause_note(vm: &GuestVm) -> Note {
    match vm.serial.history().hand_over_us() {
        Some(pause) => format!("pause {:.1} ms", Duration::from_micros(pause).as_secs_f64() * 1e3),
        None => "no hand-over".to_owned(),
    }
}
