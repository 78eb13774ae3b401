//! Who may write: claims and leases.

use futures::future::join_all;
use vmferry_planner_core::migration::Event;
use vmferry_planner_core::stuck::Trouble;
use vmferry_types::{Claim, MigrationId, PowerState, Timestamp};

use super::{NOW, NOW_US, admitted, armed, commit, ends, id, known_vm, power, power_admitted};
use crate::store::{
    Commit, MigrationRow, PowerAction, PowerKind, PowerPhase, Store, TakeOver, TakePower,
};

pub async fn a_driver_that_takes_over_fences_the_one_before(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let until = Timestamp(NOW.value() + 10_000);
    let TakeOver::Taken(first) =
        store.take_over(row.migration.id, "one", until, NOW).await.unwrap()
    else {
        panic!("not taken");
    };
    assert_eq!(first.claim, row.claim.next());
    let busy = store.take_over(id(10), "two", until, NOW).await.unwrap();
    assert_eq!(busy, TakeOver::Busy);
    assert!(store.renew_lease(&first, "one", until).await.unwrap());
    let TakeOver::Taken(second) = store.take_over(id(10), "two", until, until).await.unwrap()
    else {
        panic!("not taken");
    };
    assert!(second.claim > first.claim);
    assert!(!store.renew_lease(&first, "one", until).await.unwrap());
    let entries = first.migration.advance(armed()).unwrap();
    let late = store.commit(&first, &entries, &first.notes, NOW_US).await.unwrap();
    assert_eq!(late, Commit::Raced);
    commit(store, &second, armed()).await;
    store.clear_leases().await.unwrap();
    let anew = store.take_over(id(10), "three", until, NOW).await.unwrap();
    assert!(matches!(anew, TakeOver::Taken(_)));
}

pub async fn a_claim_is_above_every_claim_that_an_agent_has_seen(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    assert!(store.raise_claim(vm.id, Claim::from_stored(40), NOW).await.unwrap());
    for no_news in [30, 40] {
        assert!(!store.raise_claim(vm.id, Claim::from_stored(no_news), NOW).await.unwrap());
    }
    let TakeOver::Taken(taken) = store.take_over(row.migration.id, "one", NOW, NOW).await.unwrap()
    else {
        panic!("not taken");
    };
    assert_eq!(taken.claim, Claim::from_stored(41));
}

const LATER: Timestamp = Timestamp(NOW.0 + 10_000);

/// Takes a migration over under a lease that has ended by the time the next one asks.
async fn taken(store: &dyn Store, id: MigrationId, owner: &str) -> MigrationRow {
    match store.take_over(id, owner, NOW, NOW).await.unwrap() {
        TakeOver::Taken(row) => *row,
        other @ (TakeOver::Busy | TakeOver::Ended) => panic!("{other:?}"),
    }
}

async fn power_taken(store: &dyn Store, id: MigrationId, owner: &str) -> PowerAction {
    match store.take_over_power(id, owner, NOW, NOW).await.unwrap() {
        TakePower::Taken(action) => *action,
        other @ (TakePower::Busy | TakePower::Ended) => panic!("{other:?}"),
    }
}

pub async fn of_many_that_take_over_at_once_one_does(store: &dyn Store) {
    let (vm, other) = (known_vm(store, 1).await, known_vm(store, 2).await);
    admitted(store, 10, &vm).await;
    power_admitted(store, &power(20, &other, PowerKind::Stop)).await;
    let owners = ["one", "two", "three", "four"];
    let all = join_all(owners.map(|owner| store.take_over(id(10), owner, LATER, NOW))).await;
    let taken = all.iter().filter(|of| matches!(of, Ok(TakeOver::Taken(_)))).count();
    let busy = all.iter().filter(|of| matches!(of, Ok(TakeOver::Busy))).count();
    assert_eq!((taken, busy), (1, 3), "{all:?}");
    let all = join_all(owners.map(|owner| store.take_over_power(id(20), owner, LATER, NOW))).await;
    let taken = all.iter().filter(|of| matches!(of, Ok(TakePower::Taken(_)))).count();
    let busy = all.iter().filter(|of| matches!(of, Ok(TakePower::Busy))).count();
    assert_eq!((taken, busy), (1, 3), "{all:?}");
}

pub async fn a_planner_that_lost_its_lease_lands_no_write(store: &dyn Store) {
    let (vm, other) = (known_vm(store, 1).await, known_vm(store, 2).await);
    admitted(store, 10, &vm).await;
    let stop = power_admitted(store, &power(20, &other, PowerKind::Stop)).await;
    let (mine, theirs) = (taken(store, id(10), "one").await, taken(store, id(10), "two").await);
    let my_stop = power_taken(store, stop.id, "one").await;
    let their_stop = power_taken(store, stop.id, "two").await;
    let before = (store.vms().await.unwrap(), store.reservations().await.unwrap());
    for event in [armed(), Event::CancelRequested, Event::Refused { blockers: Vec::new() }] {
        let entries = mine.migration.advance(event).unwrap();
        let late = store.commit(&mine, &entries, &mine.notes, NOW_US).await.unwrap();
        assert_eq!(late, Commit::Raced);
    }
    assert!(!store.renew_lease(&mine, "one", LATER).await.unwrap());
    assert!(!store.renew_power_lease(&my_stop, "one", LATER).await.unwrap());
    let end = ends(PowerPhase::Done, PowerState::Stopped);
    assert_eq!(store.end_power(&my_stop, &end, NOW_US).await.unwrap(), Commit::Raced);
    let after = (store.vms().await.unwrap(), store.reservations().await.unwrap());
    assert_eq!(after, before);
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), theirs);
    assert_eq!(store.power(stop.id).await.unwrap().unwrap(), their_stop);
    assert!(store.renew_lease(&theirs, "two", LATER).await.unwrap());
    assert!(store.renew_power_lease(&their_stop, "two", LATER).await.unwrap());
}

pub async fn a_lease_that_reaches_further_than_one_can_keeps_nobody_away(store: &dyn Store) {
    let (vm, other) = (known_vm(store, 1).await, known_vm(store, 2).await);
    admitted(store, 10, &vm).await;
    let stop = power_admitted(store, &power(20, &other, PowerKind::Stop)).await;
    let row = taken(store, id(10), "one").await;
    let action = power_taken(store, stop.id, "one").await;
    // Twice the term is allowed for, and not a millisecond more.
    let term = LATER.value() - NOW.value();
    for (until, holds) in [(2 * term, true), (2 * term + 1, false), (3_600_000, false)] {
        let until = Timestamp(NOW.value() + until);
        assert!(store.renew_lease(&row, "one", until).await.unwrap());
        assert!(store.renew_power_lease(&action, "one", until).await.unwrap());
        if holds {
            let busy = store.take_over(id(10), "two", LATER, NOW).await.unwrap();
            assert_eq!(busy, TakeOver::Busy);
            let busy = store.take_over_power(stop.id, "two", LATER, NOW).await.unwrap();
            assert_eq!(busy, TakePower::Busy);
            continue;
        }
        let ended = store.take_over(id(10), "two", LATER, NOW).await.unwrap();
        assert!(matches!(ended, TakeOver::Taken(_)), "{ended:?}");
        let ended = store.take_over_power(stop.id, "two", LATER, NOW).await.unwrap();
        assert!(matches!(ended, TakePower::Taken(_)), "{ended:?}");
        break;
    }
}

pub async fn a_planner_that_ends_lets_go_of_its_leases_only(store: &dyn Store) {
    let (vm, other, third) =
        (known_vm(store, 1).await, known_vm(store, 2).await, known_vm(store, 3).await);
    admitted(store, 10, &vm).await;
    admitted(store, 11, &third).await;
    let stop = power_admitted(store, &power(20, &other, PowerKind::Stop)).await;
    let take = |id, owner| store.take_over(id, owner, LATER, NOW);
    for (of, owner) in [(id(10), "one"), (id(11), "two")] {
        assert!(matches!(take(of, owner).await.unwrap(), TakeOver::Taken(_)));
    }
    let taken = store.take_over_power(stop.id, "one", LATER, NOW).await.unwrap();
    assert!(matches!(taken, TakePower::Taken(_)));
    store.release_leases("one").await.unwrap();
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap().lease_owner, None);
    assert!(matches!(take(id(10), "three").await.unwrap(), TakeOver::Taken(_)));
    let taken = store.take_over_power(stop.id, "three", LATER, NOW).await.unwrap();
    assert!(matches!(taken, TakePower::Taken(_)));
    // Nobody else's.
    assert_eq!(take(id(11), "three").await.unwrap(), TakeOver::Busy);
}

pub async fn what_keeps_a_driver_is_read_by_others(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    admitted(store, 10, &vm).await;
    let row = taken(store, id(10), "one").await;
    let trouble = Trouble { text: "no route to host".to_owned(), since: NOW };
    store.note_trouble(&row, Some(&trouble)).await.unwrap();
    let read = async || store.migration(id(10)).await.unwrap().unwrap().trouble;
    assert_eq!(read().await.as_ref(), Some(&trouble));
    // An agent may say anything.
    let said = Trouble { text: "no \0 route".to_owned(), since: NOW };
    store.note_trouble(&row, Some(&said)).await.unwrap();
    assert!(read().await.unwrap().text.starts_with("no "));
    store.note_trouble(&row, Some(&trouble)).await.unwrap();
    let theirs = taken(store, id(10), "two").await;
    // Whoever was overtaken says nothing of it any more.
    store.note_trouble(&row, None).await.unwrap();
    assert_eq!(read().await.as_ref(), Some(&trouble));
    store.note_trouble(&theirs, None).await.unwrap();
    assert_eq!(read().await, None);
}

pub async fn the_clock_of_leases_goes_on(store: &dyn Store) {
    let before = store.lease_clock().await.unwrap();
    // Far from the zero of any clock that was never put.
    assert!(before.value() > 1_000_000_000_000, "{before:?}");
    assert!(store.lease_clock().await.unwrap() >= before);
}

pub async fn a_lease_keeps_others_away_until_it_ends(store: &dyn Store) {
    let (vm, other) = (known_vm(store, 1).await, known_vm(store, 2).await);
    admitted(store, 10, &vm).await;
    let stop = power_admitted(store, &power(20, &other, PowerKind::Stop)).await;
    let row = taken(store, id(10), "one").await;
    let action = power_taken(store, stop.id, "one").await;
    assert!(store.renew_lease(&row, "one", LATER).await.unwrap());
    assert!(store.renew_power_lease(&action, "one", LATER).await.unwrap());
    let before = Timestamp(LATER.value() - 1);
    let busy = store.take_over(id(10), "two", LATER, before).await.unwrap();
    assert_eq!(busy, TakeOver::Busy);
    let busy = store.take_over_power(stop.id, "two", LATER, before).await.unwrap();
    assert_eq!(busy, TakePower::Busy);
    let ended = store.take_over(id(10), "two", LATER, LATER).await.unwrap();
    assert!(matches!(ended, TakeOver::Taken(_)), "{ended:?}");
    let ended = store.take_over_power(stop.id, "two", LATER, LATER).await.unwrap();
    assert!(matches!(ended, TakePower::Taken(_)), "{ended:?}");
}
