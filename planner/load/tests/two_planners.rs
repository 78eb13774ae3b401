//! Planners that are built move VMs of simulated hosts, and are not left in peace.
//!
//! They need `vmferry-planner` beside the tests' directory or in `VMFERRY_BIN_DIR`, and the server
//! that `scripts/with-postgres` starts.

use std::path::PathBuf;
use std::time::Duration;

use vmferry_load::binaries;
use vmferry_load::console::say;
use vmferry_load::database::Kind;
use vmferry_load::disturbance::Disturb;
use vmferry_load::fleet::{Fencing, Shape, Weather};
use vmferry_load::summary::Summary;
use vmferry_load::trial::{self, Afterwards, Plan};

/// A seed of its own each time: what was drawn is in the output of a test that fails.
fn plan(name: &str) -> Plan {
    Plan {
        planner: binaries::planner_for_tests().expect("the planner is built"),
        store: Kind::Postgres,
        planners: 2,
        migrations: 200,
        shape: Shape { hosts: 10, vms_per_host: 20, room: 24 },
        weather: Weather::default(),
        disturb: Disturb::Kill,
        every: (Duration::from_secs(3), Duration::from_secs(5)),
        lease: "1s".to_owned(),
        inbound_max: 2,
        bound: Duration::from_secs(600),
        seed: binaries::fresh_seed(),
        logs: PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name),
        afterwards: Afterwards::Remove,
    }
}

#[expect(clippy::unwrap_used, reason = "a trial that cannot be run is a failed test")]
fn tried(plan: &Plan) -> Summary {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let summary = runtime.block_on(trial::run(plan)).unwrap();
    say(&summary.told());
    summary
}

fn run(plan: &Plan) -> Summary {
    let summary = tried(plan);
    assert!(summary.failures.is_empty(), "{}", summary.failures.join("\n"));
    assert_eq!(usize::try_from(summary.migrations()), Ok(plan.migrations));
    // Planners that took everything back would keep every promise, and move nothing.
    let floor = summary.migrations() / 2;
    assert!(summary.done() >= floor, "less than half of the VMs moved: {:?}", summary.ends);
    summary
}

#[test]
fn two_planners_move_two_hundred_vms_while_one_after_the_other_is_killed() {
    let summary = run(&plan("killed"));
    assert!(summary.disturbed.kills >= 2, "{:?}", summary.disturbed);
    assert!(summary.take_overs > 0, "nothing was ever taken over");
}

#[test]
fn a_planner_that_stood_still_past_its_leases_lands_no_write() {
    let shape = Shape { hosts: 6, vms_per_host: 20, room: 26 };
    let frozen = plan("frozen");
    let summary = run(&Plan { disturb: Disturb::Freeze, migrations: 120, shape, ..frozen });
    assert!(summary.disturbed.freezes >= 2, "{:?}", summary.disturbed);
    assert!(summary.take_overs > 0, "nothing was ever taken over");
}

#[test]
fn a_planner_alone_on_its_file_goes_on_where_it_was_killed() {
    let shape = Shape { hosts: 4, vms_per_host: 15, room: 20 };
    let alone = plan("alone");
    let summary = run(&Plan { store: Kind::Sqlite, planners: 1, migrations: 60, shape, ..alone });
    assert!(summary.disturbed.kills >= 1, "{:?}", summary.disturbed);
}

#[test]
fn agents_that_obey_anybody_are_found_out() {
    let shape = Shape { hosts: 4, vms_per_host: 15, room: 20 };
    let weather = Weather { fence: Fencing::Ignored, doubled: 300, ..Weather::default() };
    let alone = plan("unfenced");
    let (store, planners) = (Kind::Sqlite, 1);
    let summary = tried(&Plan { store, planners, migrations: 60, shape, weather, ..alone });
    let found = summary.failures.iter().any(|failure| failure.contains("I2: "));
    assert!(found, "an older command was obeyed and nobody noticed: {:?}", summary.failures);
}
