//! What is decided together, before a migration holds anything.

use std::collections::BTreeSet;

use futures::future::join_all;
use vmferry_planner_core::migration::Event;
use vmferry_types::{Generation, MigrationId, PhaseLabel, PowerState, Seq};

use super::{
    MEMORY, NOW, NOW_US, admitted, commit, gone, grant, host, id, known_vm, power, refusal,
    request, room, vm, vm_id,
};
use crate::store::{
    Admission, AdmitPower, Cordon, Grant, Granted, MigrationRow, NewMigration, PowerKind, Refused,
    Store, VmRow,
};

pub async fn admission_reserves_both_ends_and_takes_the_next_claim(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    assert_eq!(row.migration.label(), PhaseLabel::Admitted);
    assert_eq!(row.claim, vm.claim.next());
    let reserved = store.reservations().await.unwrap();
    let hosts: Vec<&str> = reserved.iter().map(|of| of.host.as_str()).collect();
    assert_eq!(hosts, ["a", "b"]);
    assert!(reserved.iter().all(|of| of.memory == MEMORY && of.vm == vm.id));
    let after = store.vm(vm.id).await.unwrap().unwrap();
    assert_eq!(after.admission, Some(id(10)));
    assert_eq!(after.claim, row.claim);
    assert_eq!(after.host, Some(host("a")));
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), row);
}

pub async fn admission_refuses_what_does_not_fit(store: &dyn Store) {
    let (first, second) = (known_vm(store, 1).await, known_vm(store, 2).await);
    let fits = request(10, &first, Ok(grant("b", room(1))));
    assert!(matches!(store.admit(&fits, NOW_US).await.unwrap(), Admission::Admitted(_)));
    let full = request(11, &second, Ok(grant("b", room(1))));
    assert_eq!(refusal(store, &full).await, Refused::NoRoom { note: "1 reserved".to_owned() });
    assert_eq!(store.vm(second.id).await.unwrap().unwrap().admission, None);
    assert_eq!(store.migration(id(11)).await.unwrap(), None);
}

pub async fn admission_refuses_a_vm_that_does_not_run(store: &dyn Store) {
    let row = VmRow { power: PowerState::Stopped, ..vm(1, "vm1") };
    store.adopt_vm(&row, NOW).await.unwrap();
    let new = request(10, &row, Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &new).await, Refused::Power { power: PowerState::Stopped });
    let unknown = request(11, &vm(2, "vm2"), Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &unknown).await, Refused::UnknownVm);
}

pub async fn one_admission_at_a_time(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    admitted(store, 10, &vm).await;
    let second = request(11, &vm, Ok(grant("c", room(9))));
    assert_eq!(refusal(store, &second).await, Refused::InFlight { admission: id(10) });
    let stop = store.admit_power(&power(12, &vm, PowerKind::Stop), NOW_US).await.unwrap();
    assert_eq!(stop, AdmitPower::Refused(Refused::InFlight { admission: id(10) }));
}

pub async fn admission_refuses_a_vm_that_moved_on(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let mut old = request(10, &vm, Ok(grant("b", room(9))));
    old.migration.generation = Generation::FIRST.next();
    assert!(matches!(refusal(store, &old).await, Refused::Moved { .. }));
    let mut elsewhere = request(10, &vm, Ok(grant("b", room(9))));
    elsewhere.migration.source = host("c");
    assert!(matches!(refusal(store, &elsewhere).await, Refused::Moved { .. }));
}

pub async fn admission_refuses_a_cordoned_host_until_the_cordon_ends(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let cordon = Cordon {
        host: host("b"),
        owner: "operator".to_owned(),
        reason: "disks".to_owned(),
        since: NOW,
        expires: None,
    };
    store.cordon(&cordon).await.unwrap();
    let new = request(10, &vm, Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &new).await, Refused::Cordoned { host: host("b") });
    store.cordon(&Cordon { expires: Some(NOW), ..cordon.clone() }).await.unwrap();
    assert!(store.cordons(NOW).await.unwrap().is_empty());
    store.cordon(&cordon).await.unwrap();
    assert_eq!(store.cordons(NOW).await.unwrap(), [cordon]);
    store.uncordon(&host("b"), "operator").await.unwrap();
    assert!(matches!(store.admit(&new, NOW_US).await.unwrap(), Admission::Admitted(_)));
}

pub async fn a_destination_receives_no_more_than_its_cap(store: &dyn Store) {
    let vms = [known_vm(store, 1).await, known_vm(store, 2).await, known_vm(store, 3).await];
    admitted(store, 10, &vms[0]).await;
    let second = admitted(store, 11, &vms[1]).await;
    let third = request(12, &vms[2], Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &third).await, Refused::InboundCap { host: host("b"), inbound: 2 });
    let refused = Event::Refused { blockers: Vec::new() };
    let mut row = commit(store, &second, refused).await;
    while row.ended_us.is_none() {
        row = commit(store, &row, gone()).await;
    }
    assert!(matches!(store.admit(&third, NOW_US).await.unwrap(), Admission::Admitted(_)));
}

pub async fn an_emptying_has_no_more_under_way_than_it_may_and_what_waits_does_not_count(
    store: &dyn Store,
) {
    let vms = [known_vm(store, 1).await, known_vm(store, 2).await, known_vm(store, 3).await];
    let of = |number, vm: &VmRow, grant| {
        let mut new = request(number, vm, grant);
        new.notes.sake.emptying = "a-job".to_owned();
        new.notes.sake.max_parallel = Some(1);
        new
    };
    let waits = of(10, &vms[0], Err("full".to_owned()));
    let Admission::Admitted(waits) = store.admit(&waits, NOW_US).await.unwrap() else {
        panic!("not queued");
    };
    let runs = of(11, &vms[1], Ok(grant("b", room(9))));
    let Admission::Admitted(runs) = store.admit(&runs, NOW_US).await.unwrap() else {
        panic!("held up by one that waits");
    };
    let limit = || Refused::OwnLimit { emptying: "a-job".to_owned(), running: 1, max: 1 };
    let third = of(12, &vms[2], Ok(grant("c", room(9))));
    assert_eq!(refusal(store, &third).await, limit());
    // Also the one that waits has to wait for its turn, though there is room by now.
    let granted = store.grant(&waits, &grant("c", room(9)), NOW_US).await.unwrap();
    let Granted::Refused(refused) = granted else { panic!("{granted:?}") };
    assert_eq!(refused, limit());
    // Room is asked first: who has none is not said to have its turn next.
    let granted = store.grant(&waits, &grant("c", room(0)), NOW_US).await.unwrap();
    assert!(matches!(granted, Granted::Refused(Refused::NoRoom { .. })), "{granted:?}");
    let mut row = commit(store, &runs, Event::Refused { blockers: Vec::new() }).await;
    while row.ended_us.is_none() {
        row = commit(store, &row, gone()).await;
    }
    let granted = store.grant(&waits, &grant("c", room(9)), NOW_US).await.unwrap();
    assert!(matches!(granted, Granted::Done(_)), "{granted:?}");
}

pub async fn admission_keeps_to_the_pin_of_the_definition(store: &dyn Store) {
    let definition =
        format!("name = \"vm1\"\nuuid = \"{}\"\nmemory = \"1GiB\"\npin = \"a\"\n", vm_id(1));
    let row = VmRow { definition, ..vm(1, "vm1") };
    store.adopt_vm(&row, NOW).await.unwrap();
    let new = request(10, &row, Ok(grant("b", room(9))));
    assert_eq!(refusal(store, &new).await, Refused::Pinned { pin: host("a") });
}

pub async fn the_same_request_is_answered_with_the_same_migration(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let row = admitted(store, 10, &vm).await;
    let mut again = request(11, &vm, Ok(grant("b", room(9))));
    again.request = Some("request-10".to_owned());
    assert_eq!(store.admit(&again, NOW_US).await.unwrap(), Admission::Known(Box::new(row.clone())));
    assert_eq!(store.migration_of_request("request-10").await.unwrap(), Some(row));
    assert_eq!(store.migration_of_request("request-99").await.unwrap(), None);
}

pub async fn a_queued_migration_holds_nothing_until_it_is_granted(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let new = request(10, &vm, Err("full".to_owned()));
    let Admission::Admitted(row) = store.admit(&new, NOW_US).await.unwrap() else {
        panic!("not queued");
    };
    assert_eq!(row.migration.label(), PhaseLabel::Queued);
    assert!(store.reservations().await.unwrap().is_empty());
    let refused = store.grant(&row, &grant("b", room(0)), NOW_US).await.unwrap();
    assert!(matches!(refused, Granted::Refused(Refused::NoRoom { .. })));
    let stale = MigrationRow { seq: Seq::FIRST, ..(*row).clone() };
    assert_eq!(store.grant(&stale, &grant("b", room(9)), NOW_US).await.unwrap(), Granted::Raced);
    let Granted::Done(after) = store.grant(&row, &grant("b", room(9)), NOW_US).await.unwrap()
    else {
        panic!("not granted");
    };
    assert_eq!(after.migration.label(), PhaseLabel::Admitted);
    assert_eq!(store.reservations().await.unwrap().len(), 2);
}

pub async fn one_of_many_at_once_is_admitted_for_a_vm(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let asked: Vec<NewMigration> =
        (10..20).map(|of| request(of, &vm, Ok(grant("b", room(99))))).collect();
    let all = join_all(asked.iter().map(|new| store.admit(new, NOW_US))).await;
    let (mut admitted, mut in_flight) = (Vec::new(), Vec::new());
    for admission in all {
        match admission.unwrap() {
            Admission::Admitted(row) => admitted.push(row.migration.id),
            Admission::Refused(Refused::InFlight { admission }) => in_flight.push(admission),
            other @ (Admission::Known(_) | Admission::Refused(_) | Admission::Raced) => {
                panic!("{other:?}")
            }
        }
    }
    assert_eq!((admitted.len(), in_flight.len()), (1, 9));
    assert!(in_flight.iter().all(|of| *of == admitted[0]));
}

pub async fn fifty_admissions_at_once_never_exceed_the_room(store: &dyn Store) {
    const ROOM: usize = 7;
    let mut asked = Vec::new();
    for of in 0..50 {
        let vm = known_vm(store, 100 + of).await;
        let grant = Grant { inbound_max: 99, ..grant("b", room(ROOM)) };
        asked.push(request(1000 + of, &vm, Ok(grant)));
    }
    let all = join_all(asked.iter().map(|new| store.admit(new, NOW_US))).await;
    let mut admitted = 0;
    for admission in all {
        match admission.unwrap() {
            Admission::Admitted(_) => admitted += 1,
            Admission::Refused(Refused::NoRoom { .. }) => {}
            other @ (Admission::Known(_) | Admission::Refused(_) | Admission::Raced) => {
                panic!("{other:?}")
            }
        }
    }
    assert_eq!(admitted, ROOM);
    let reserved = store.reservations().await.unwrap();
    assert_eq!(reserved.iter().filter(|of| of.host == host("b")).count(), ROOM);
}

pub async fn admissions_at_once_never_exceed_the_cap_of_a_destination(store: &dyn Store) {
    let mut asked = Vec::new();
    for of in 0..12 {
        let vm = known_vm(store, 100 + of).await;
        asked.push(request(1000 + of, &vm, Ok(grant("b", room(99)))));
    }
    let all = join_all(asked.iter().map(|new| store.admit(new, NOW_US))).await;
    let admitted = all.into_iter().filter(|of| matches!(of, Ok(Admission::Admitted(_)))).count();
    assert_eq!(admitted, 2);
}

pub async fn the_same_request_at_once_leads_to_one_migration(store: &dyn Store) {
    let vms = [known_vm(store, 1).await, known_vm(store, 2).await];
    let asked: Vec<NewMigration> = (10..18)
        .map(|of| NewMigration {
            request: Some("once".to_owned()),
            ..request(of, &vms[usize::from(of % 2 == 0)], Ok(grant("b", room(99))))
        })
        .collect();
    let all = join_all(asked.iter().map(|new| store.admit(new, NOW_US))).await;
    let ids: BTreeSet<MigrationId> = all
        .into_iter()
        .map(|admission| match admission.unwrap() {
            Admission::Admitted(row) | Admission::Known(row) => row.migration.id,
            other @ (Admission::Refused(_) | Admission::Raced) => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ids.len(), 1);
}

pub async fn a_queued_migration_is_granted_once(store: &dyn Store) {
    let vm = known_vm(store, 1).await;
    let new = request(10, &vm, Err("full".to_owned()));
    let Admission::Admitted(row) = store.admit(&new, NOW_US).await.unwrap() else {
        panic!("not queued");
    };
    let grants: Vec<Grant> = (0..4).map(|_| grant("b", room(9))).collect();
    let all = join_all(grants.iter().map(|grant| store.grant(&row, grant, NOW_US))).await;
    let done = all.iter().filter(|of| matches!(of, Ok(Granted::Done(_)))).count();
    let raced = all.iter().filter(|of| matches!(of, Ok(Granted::Raced))).count();
    assert_eq!((done, raced), (1, 3));
}
