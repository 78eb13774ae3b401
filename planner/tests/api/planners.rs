//! Several planners on one database: what one leaves undone another does, and what one writes the
//! others see.

use futures::future::join_all;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use uuid::Uuid;
use vmferry_planner::config::StoreUrl;
use vmferry_proto::v1;

use crate::bench::{Bench, definition, found, until};
use crate::operator::dead;
use crate::world::{Pace, Silence, World};

const HOSTS: [&str; 2] = ["a", "b"];

/// A database of a test's own, and the way to the server that has it.
pub(crate) struct Database {
    name: String,
    server: String,
}

impl Database {
    pub(crate) async fn new() -> Self {
        let server = std::env::var("VMFERRY_TEST_POSTGRES").expect(
            "VMFERRY_TEST_POSTGRES names no server; run the tests as `scripts/with-postgres cargo nextest run …`",
        );
        let name = format!("test_{}", Uuid::new_v4().simple());
        let database = Self { name, server };
        database.tell(&format!("CREATE DATABASE {}", database.name)).await;
        database
    }

    pub(crate) fn url(&self) -> StoreUrl {
        let url = self.server.replacen("/postgres?", &format!("/{}?", self.name), 1);
        StoreUrl::postgres(&url).unwrap()
    }

    /// Tells the server something about the database.
    async fn tell(&self, text: &str) {
        let mut connection = PgConnection::connect(&self.server).await.unwrap();
        sqlx::query(AssertSqlSafe(text.to_owned())).execute(&mut connection).await.unwrap();
    }

    /// Cuts every connection, and refuses new ones.
    async fn goes_away(&self) {
        self.tell(&format!("ALTER DATABASE {} ALLOW_CONNECTIONS false", self.name)).await;
        let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname";
        self.tell(&format!("{cut} = '{}'", self.name)).await;
    }

    async fn comes_back(&self) {
        self.tell(&format!("ALTER DATABASE {} ALLOW_CONNECTIONS true", self.name)).await;
    }
}

async fn two_planners() -> (Bench, Bench, Database) {
    let (world, database) = (World::new(&HOSTS), Database::new().await);
    let one = Bench::sharing(&world, &database.url(), &HOSTS).await;
    let two = Bench::sharing(&world, &database.url(), &HOSTS).await;
    (one, two, database)
}

/// Runs a migration whose planner dies while the agent that got the `nth` command is silent.
async fn taken_over_at(nth: usize) {
    let (one, two, _database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.fall_silent_at(nth, Silence::After);
    let before = one.world.commands().len();
    let asked = one.migrate("web1", "b").await;
    let world = one.world.clone();
    until(|| world.commands().len() > before + nth).await;
    one.dies().await;
    two.world.all_answer();
    two.report(&HOSTS).await;
    let ended = two.ended(&asked.id).await;
    assert_eq!(ended.phase, "done", "{ended:#?}");
    assert_eq!(two.world.running(&vm.id), ["b"]);
    assert!(two.planner.store().reservations().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_migration_of_a_planner_that_died_is_taken_over_at_every_command() {
    join_all((0..5).map(taken_over_at)).await;
}

#[tokio::test]
async fn a_planner_that_is_told_to_end_lets_go_of_what_it_drives() {
    let (one, two, _database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.pace(Pace::Endless);
    let asked = one.migrate("web1", "b").await;
    let world = one.world.clone();
    until(|| world.commands().iter().any(|command| command.starts_with("start_transfer"))).await;
    let id = asked.id.parse().unwrap();
    let driven = two.planner.store().migration(id).await.unwrap().unwrap();
    let owner = driven.lease_owner.unwrap();
    if owner == one.planner.owner {
        one.leaves().await;
    } else {
        // A busy machine let the lease go.
        one.dies().await;
    }
    let left = two.planner.store().migration(id).await.unwrap().unwrap();
    assert_ne!(left.lease_owner.as_ref(), Some(&owner), "{left:?}");
    two.planner.cancel_migration(&asked.id).await.unwrap();
    assert_eq!(two.ended(&asked.id).await.phase, "aborted");
    assert_eq!(two.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_start_of_a_planner_that_died_is_taken_over() {
    let (one, two, _database) = two_planners().await;
    one.world.fall_silent_at(0, Silence::Before);
    let before = one.world.commands().len();
    let asked = v1::StartVmRequest {
        definition: definition("web1", 1),
        host: "a".to_owned(),
        ..v1::StartVmRequest::default()
    };
    one.planner.start_vm(asked.clone()).await.unwrap();
    let world = one.world.clone();
    until(|| world.commands().len() > before).await;
    one.dies().await;
    two.world.all_answer();
    two.report(&HOSTS).await;
    // Asking again is the same start; another planner drives it, and its end is heard.
    let wait = v1::StartVmRequest { wait_ms: 15_000, ..asked };
    let vm = two.planner.start_vm(wait).await.unwrap();
    assert_eq!(vm.power, "running");
    assert_eq!(two.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_host_that_another_planner_hears_is_not_declared_dead() {
    let (one, two, _database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&["a"]).await;
    // Only the way from the first planner is broken: to it, the host is as if it were off.
    one.world.silence("a");
    let asked = dead("a");
    let error = one.planner.declare_host_dead(asked.clone()).await.unwrap_err();
    assert_eq!(error.blockers()[0].code, "host_heard", "{error}");
    assert_eq!(one.planner.get_vm("web1").await.unwrap().power, "running");
    // Nobody has heard it for as long as a report counts.
    let long_ago = vmferry_types::Timestamp(1);
    let host = "a".parse().unwrap();
    two.planner
        .store()
        .hear_hosts(std::slice::from_ref(&host), &two.planner.owner, long_ago)
        .await
        .unwrap();
    let declared = one.planner.declare_host_dead(asked).await.unwrap();
    assert_eq!(declared.status, "dead");
    assert_eq!(one.planner.get_vm(&vm.id).await.unwrap().power, "lost");
}

#[tokio::test]
async fn a_death_counts_also_for_a_planner_that_heard_the_host_under_an_older_boot_only() {
    let (one, two, _database) = two_planners().await;
    one.report(&HOSTS).await;
    two.report(&HOSTS).await;
    let mut booted = two.world.report("a");
    booted.boot_id = "another boot".to_owned();
    booted.agent_instance = "another process".to_owned();
    assert_eq!(two.planner.report(booted).await.unwrap().refused, "");
    two.world.silence("a");
    let host = "a".parse().unwrap();
    let long_ago = vmferry_types::Timestamp(1);
    two.planner
        .store()
        .hear_hosts(std::slice::from_ref(&host), &one.planner.owner, long_ago)
        .await
        .unwrap();
    let asked = dead("a");
    two.planner.declare_host_dead(asked).await.unwrap();
    found(async || {
        let host = one.planner.get_host("a").await.unwrap();
        (host.status == "dead").then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_keeps_a_driver_is_shown_by_a_planner_that_does_not_drive() {
    let (one, two, _database) = two_planners().await;
    one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.fall_silent_at(0, Silence::Before);
    let asked = one.migrate("web1", "b").await;
    let id = asked.id.parse().unwrap();
    let store = two.planner.store();
    let mut row =
        found(async || store.migration(id).await.unwrap().filter(|row| row.trouble.is_some()))
            .await;
    // As somebody sees it who drives nothing, and comes by an hour later.
    row.notes.entered_us = 0;
    let stuck = vmferry_planner::view::stuck(&row, &vmferry_planner::live::Seen::default());
    let cause = stuck.unwrap().cause;
    assert!(cause.contains("agent of host b did not answer"), "{cause}");
    one.world.all_answer();
    assert_eq!(two.ended(&asked.id).await.phase, "done");
}

#[tokio::test]
async fn what_a_planner_saw_while_it_drove_is_not_shown_once_another_drives() {
    let (one, two, _database) = two_planners().await;
    one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.pace(Pace::Endless);
    let asked = one.migrate("web1", "b").await;
    let id = asked.id.parse().unwrap();
    let world = one.world.clone();
    until(|| world.commands().iter().any(|command| command.starts_with("start_transfer"))).await;
    let row = two.planner.store().migration(id).await.unwrap().unwrap();
    let owner = row.lease_owner.unwrap();
    let other = if owner == one.planner.owner { &two } else { &one };
    // As one that hung on its store until its lease was over.
    other.planner.live.update(id, |live| {
        live.source = Some(v1::VmObservation::default());
        live.trouble = Some(("the store did not answer".to_owned(), 1));
    });
    until(|| other.planner.live.seen(id).source.is_none_or(|seen| !seen.vm_id.is_empty())).await;
    let seen = other.planner.live.seen(id).trouble;
    assert!(seen.is_none_or(|(text, _)| !text.contains("the store")), "it is another's to tell");
    two.planner.cancel_migration(&asked.id).await.unwrap();
    assert_eq!(two.ended(&asked.id).await.phase, "aborted");
}

#[tokio::test]
async fn a_cancel_by_another_planner_reaches_the_one_that_drives() {
    let (one, two, _database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.pace(Pace::Endless);
    let asked = one.migrate("web1", "b").await;
    let world = one.world.clone();
    until(|| world.commands().iter().any(|command| command.starts_with("start_transfer"))).await;
    two.planner.cancel_migration(&asked.id).await.unwrap();
    let ended = one.ended(&asked.id).await;
    assert_eq!((ended.state.as_str(), ended.phase.as_str()), ("cancelled", "aborted"));
    assert_eq!(one.world.running(&vm.id), ["a"]);
}

#[tokio::test]
async fn a_database_that_goes_away_for_a_while_ends_no_migration() {
    let (one, two, database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.pace(Pace::Endless);
    let asked = one.migrate("web1", "b").await;
    let world = one.world.clone();
    until(|| world.commands().iter().any(|command| command.starts_with("start_transfer"))).await;
    database.goes_away().await;
    let id = asked.id.parse().unwrap();
    // Either drives it: a lease is short here, and a busy machine may let it go.
    until(|| [&one, &two].iter().any(|of| of.planner.live.seen(id).trouble.is_some())).await;
    assert!(one.planner.get_migration(&asked.id).await.is_err());
    database.comes_back().await;
    one.planner.wake.notify_one();
    let cancelled = loop {
        if let Ok(cancelled) = two.planner.cancel_migration(&asked.id).await {
            break cancelled;
        }
    };
    assert!(cancelled.cancel_requested);
    assert_eq!(two.ended(&asked.id).await.phase, "aborted");
    assert_eq!(two.world.running(&vm.id), ["a"]);
}

/// A planner that answered from memory told an agent that it still owned what another had moved.
#[tokio::test]
async fn a_planner_that_moved_nothing_tells_agents_who_owns_a_vm_now() {
    let (one, two, _database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    assert_eq!(two.planner.get_vm("web1").await.unwrap().host, "a");
    let before = two.world.report("a").vms;
    let asked = one.migrate("web1", "b").await;
    assert_eq!(one.ended(&asked.id).await.phase, "done");
    // An agent that was away, and still has what it had.
    let mut late = two.world.report("a");
    late.vms = before;
    let told = two.planner.report(late).await.unwrap().generations;
    assert_eq!(told.len(), 1, "{told:?}");
    let owner = (told[0].vm_id.as_str(), told[0].host_id.as_str(), told[0].generation);
    assert_eq!(owner, (vm.id.as_str(), "b", vm.generation + 1));
    assert_eq!(two.planner.get_vm("web1").await.unwrap().host, "b");
}

#[tokio::test]
async fn a_vm_is_given_to_one_of_two_planners_that_ask_at_once() {
    let (one, two, _database) = two_planners().await;
    let vm = one.start("web1", 1, "a").await;
    two.report(&HOSTS).await;
    one.world.pace(Pace::Endless);
    let ask = |bench: &Bench| {
        let planner = std::sync::Arc::clone(&bench.planner);
        async move {
            let asked = v1::MigrateVmRequest {
                vm_name: "web1".to_owned(),
                target_host: "b".to_owned(),
                ..v1::MigrateVmRequest::default()
            };
            planner.migrate_vm(asked).await
        }
    };
    let (first, second) = tokio::join!(ask(&one), ask(&two));
    assert_eq!(usize::from(first.is_ok()) + usize::from(second.is_ok()), 1);
    let admitted = first.or(second).unwrap();
    two.planner.cancel_migration(&admitted.id).await.unwrap();
    one.ended(&admitted.id).await;
    assert_eq!(one.world.running(&vm.id), ["a"]);
}
