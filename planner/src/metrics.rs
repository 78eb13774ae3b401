//! What the planner shows to Prometheus: levels read from rows and reports when they are asked for,
//! so that nothing stale is ever shown.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use vmferry_planner_core::capacity::figures;
use vmferry_planner_core::fleet::Fleet;
use vmferry_planner_core::lifecycle::{Emptying, Kind};
use vmferry_planner_core::queue::Priority;
use vmferry_tls::Security;
use vmferry_types::{PhaseLabel, Timestamp};

use crate::api::ApiError;
use crate::clock;
use crate::inventory::snapshot;
use crate::planner::Planner;
use crate::queue::{Queued, Row, queued};
use crate::store::{EmptyingFilter, EmptyingRow, Filter, MigrationRow, OnlyOpen, Which};
use crate::view;

/// The one label of gauges that have one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

/// What empties a host: of which kind, and in which state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindState {
    kind: &'static str,
    state: &'static str,
}

/// A VM's standing in what empties its host.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindOnly {
    kind: &'static str,
}

/// What waits for room: a migration or a start, and for whose sake.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindPriority {
    kind: &'static str,
    priority: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Host {
    host: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Vm {
    vm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Certificate {
    of: &'static str,
}

type ByHost = Family<Host, Gauge<f64, AtomicU64>>;

/// Writes all metrics as text.
///
/// # Errors
///
/// Fails if the store does.
pub async fn render(planner: &Planner, security: &Security) -> Result<String, ApiError> {
    let open = Filter { open: OnlyOpen::Open, ..Filter::default() };
    let rows = planner.store().migrations(&open).await?;
    let parts = &planner.parts;
    let fleet =
        snapshot(&parts.inventory, planner.store(), &parts.config.policy, clock::now()).await?;
    let mut registry = Registry::with_prefix("vmferry");
    migrations(&mut registry, planner, &rows);
    hosts(&mut registry, &fleet);
    let open = EmptyingFilter { which: Which::Open, ..EmptyingFilter::default() };
    emptyings(&mut registry, &planner.store().emptyings(&open).await?);
    queue(&mut registry, &queued(planner).await?, clock::now());
    tasks(&mut registry);
    certificates(&mut registry, security);
    let mut out = String::new();
    // Writing into a String does not fail; if it did, what is there is still true.
    if text::encode(&mut out, &registry).is_err() {
        out.push_str("# EOF\n");
    }
    Ok(out)
}

fn migrations(registry: &mut Registry, planner: &Planner, rows: &[MigrationRow]) {
    let phases = Family::<Phase, Gauge>::default();
    for phase in PhaseLabel::ALL.iter().filter(|phase| !phase.is_terminal()) {
        phases.get_or_create(&Phase { phase: phase.label() }).set(0);
    }
    let (stuck, still): (Gauge, Gauge<f64, AtomicU64>) = (Gauge::default(), Gauge::default());
    let (eta, diverging) =
        (Family::<Vm, Gauge<f64, AtomicU64>>::default(), Family::<Vm, Gauge>::default());
    let mut still_max: u64 = 0;
    for row in rows {
        phases.get_or_create(&Phase { phase: row.migration.label().label() }).inc();
        let live = planner.live.seen(row.migration.id);
        if view::stuck(row, &live).is_some() {
            stuck.inc();
        }
        still_max = still_max.max(view::still_ms(row, &live));
        let shown = view::summary(planner, row);
        let label = Vm { vm: row.vm_name.clone() };
        if shown.eta_ms > 0 {
            eta.get_or_create(&label).set(seconds(shown.eta_ms));
        }
        diverging.get_or_create(&label).set(i64::from(!shown.verdict.is_empty()));
    }
    registry.register(
        "migration_eta_seconds",
        "How long until the switchover as the last pass tells, in seconds; absent if not known",
        eta,
    );
    registry.register(
        "migration_diverged",
        "Whether a migration that is open was found not to converge",
        diverging,
    );
    still.set(seconds(still_max));
    registry.register("migrations_open", "Migrations that still owe something, by phase", phases);
    registry.register("migrations_stuck", "Migrations that do not get on by themselves", stuck);
    registry.register(
        "guest_still_seconds_max",
        "How long the guest that stands still longest has done so, in seconds",
        still,
    );
}

fn hosts(registry: &mut Registry, fleet: &Fleet) {
    let (age, free, total) = (ByHost::default(), ByHost::default(), ByHost::default());
    for host in fleet.hosts.values() {
        let label = Host { host: host.id.to_string() };
        if let Some(report) = &host.report {
            age.get_or_create(&label).set(seconds(fleet.now.since(report.at).value()));
        }
        if let Ok(figures) = figures(host, &fleet.policy) {
            free.get_or_create(&label).set(amount(figures.free_memory.value()));
            total.get_or_create(&label).set(amount(figures.total_memory.value()));
        }
    }
    registry.register("report_age_seconds", "Age of each host's last report, in seconds", age);
    registry.register("host_memory_free_bytes", "Memory that may still be promised", free);
    registry.register("host_memory_total_bytes", "Memory of the host", total);
}

/// Those that are not over. One whose VMs are blocked does not get on by itself.
fn emptyings(registry: &mut Registry, rows: &[EmptyingRow]) {
    let states = Family::<KindState, Gauge>::default();
    let (left, blocked) =
        (Family::<KindOnly, Gauge>::default(), Family::<KindOnly, Gauge>::default());
    for kind in Kind::ALL {
        let label = KindOnly { kind: kind.label() };
        left.get_or_create(&label).set(0);
        blocked.get_or_create(&label).set(0);
        for state in Emptying::open_labels(*kind) {
            states.get_or_create(&KindState { kind: kind.label(), state }).set(0);
        }
    }
    for row in rows {
        let kind = row.emptying.kind().label();
        states.get_or_create(&KindState { kind, state: row.emptying.label() }).inc();
        let count = |of: usize| i64::try_from(of).unwrap_or(i64::MAX);
        let still = row.emptying.still_there();
        left.get_or_create(&KindOnly { kind }).inc_by(count(still.left));
        blocked.get_or_create(&KindOnly { kind }).inc_by(count(still.blocked));
    }
    registry.register(
        "emptyings_open",
        "Maintenance jobs, drains and retirements that are not over, by kind and state",
        states,
    );
    registry.register(
        "emptying_vms_left",
        "VMs that have yet to leave hosts that are emptied, by kind",
        left,
    );
    registry.register(
        "emptying_vms_blocked",
        "VMs that have to leave a host that is emptied and have no place to go, by kind",
        blocked,
    );
}

/// What waits for room.
fn queue(registry: &mut Registry, rows: &[Queued], now: Timestamp) {
    let waiting = Family::<KindPriority, Gauge>::default();
    let oldest = Family::<KindPriority, Gauge<f64, AtomicU64>>::default();
    for kind in ["migration", "start"] {
        for priority in Priority::ALL {
            let label = KindPriority { kind, priority: priority.label() };
            waiting.get_or_create(&label).set(0);
            oldest.get_or_create(&label).set(0.0);
        }
    }
    for of in rows {
        let kind = match &of.row {
            Row::Migration(_) => "migration",
            Row::Start(_) => "start",
        };
        let label = KindPriority { kind, priority: of.waiting.priority.label() };
        waiting.get_or_create(&label).inc();
        if let Some(since) = of.waiting.blocked_since {
            let gauge = oldest.get_or_create(&label);
            let age = seconds(now.since(since).value());
            gauge.set(gauge.get().max(age));
        }
    }
    registry.register(
        "queue_waiting",
        "Migrations and starts that wait for room, by kind and priority",
        waiting,
    );
    registry.register(
        "queue_oldest_age_seconds",
        "How long the one that waits longest has been without room, in seconds; 0 if none waits",
        oldest,
    );
}

/// Says until when certificates count, and whether the files that are there are the ones in use.
fn certificates(registry: &mut Registry, security: &Security) {
    let Some(live) = security.live() else { return };
    let ends = Family::<Certificate, Gauge>::default();
    for expiry in live.current().expiries() {
        let not_after = i64::try_from(expiry.not_after).unwrap_or(i64::MAX);
        ends.get_or_create(&Certificate { of: expiry.of }).set(not_after);
    }
    let usable: Gauge = Gauge::default();
    usable.set(i64::from(live.trouble().is_none()));
    registry.register(
        "planner_certificate_not_after_seconds",
        "Until when certificates count, in seconds since 1970",
        ends,
    );
    registry.register(
        "planner_certificate_files_usable",
        "Whether the certificate files that are there are in use (1) or broken (0)",
        usable,
    );
}

/// Counts the tasks that have not ended: connections, calls, drivers.
fn tasks(registry: &mut Registry) {
    let gauge: Gauge = Gauge::default();
    let alive = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    gauge.set(i64::try_from(alive).unwrap_or(i64::MAX));
    registry.register("planner_tokio_tasks", "Tasks of the planner that have not ended", gauge);
}

fn seconds(ms: u64) -> f64 {
    amount(ms) / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "a display: 53 bits are enough of any amount")]
fn amount(value: u64) -> f64 {
    value as f64
}
