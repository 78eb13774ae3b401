//! Starts and stops.

use std::collections::BTreeSet;

use futures::future::join_all;
use vmferry_types::{Generation, PowerState, VmId};

use super::{NOW, NOW_US, ends, host, known_vm, power, power_admitted, vm};
use crate::store::{
    AdmitPower, Commit, NewPower, PowerKind, PowerPhase, Refused, Room, Store, TakePower, VmRow,
};

pub async fn a_start_elsewhere_takes_the_next_generation(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let stop = power_admitted(store, &power(20, &row, PowerKind::Stop)).await;
    assert_eq!(stop.generation, Generation::FIRST);
    assert_eq!(store.vm(row.id).await.unwrap().unwrap().power, PowerState::Stopping);
    store.end_power(&stop, &ends(PowerPhase::Done, PowerState::Stopped), NOW_US).await.unwrap();
    let elsewhere = NewPower { host: host("b"), ..power(21, &row, PowerKind::Start) };
    let start = power_admitted(store, &elsewhere).await;
    assert_eq!(start.generation, Generation::FIRST.next());
    assert!(start.claim > stop.claim);
    let after = store.vm(row.id).await.unwrap().unwrap();
    assert_eq!((after.host, after.power), (Some(host("b")), PowerState::Starting));
    assert_eq!(store.reservations().await.unwrap().len(), 1);
}

pub async fn a_start_or_stop_ends_once_and_under_its_own_claim(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let stop = power_admitted(store, &power(20, &row, PowerKind::Stop)).await;
    let TakePower::Taken(claimed) = store.take_over_power(stop.id, "one", NOW, NOW).await.unwrap()
    else {
        panic!("not taken");
    };
    assert!(claimed.claim > stop.claim);
    let end = ends(PowerPhase::Done, PowerState::Stopped);
    assert_eq!(store.end_power(&stop, &end, NOW_US).await.unwrap(), Commit::Raced);
    assert_eq!(store.open_power().await.unwrap().len(), 1);
    assert_eq!(store.end_power(&claimed, &end, NOW_US).await.unwrap(), Commit::Done(()));
    assert_eq!(store.end_power(&claimed, &end, NOW_US).await.unwrap(), Commit::Raced);
    let ended = store.take_over_power(stop.id, "one", NOW, NOW).await.unwrap();
    assert_eq!(ended, TakePower::Ended);
    assert!(store.open_power().await.unwrap().is_empty());
    assert!(store.reservations().await.unwrap().is_empty());
    assert_eq!(store.power(stop.id).await.unwrap().unwrap().phase, PowerPhase::Done);
    let refused = store.admit_power(&power(21, &row, PowerKind::Stop), NOW_US).await.unwrap();
    let stopped = Refused::Power { power: PowerState::Stopped };
    assert_eq!(refused, AdmitPower::Refused(stopped));
}

pub async fn starts_at_once_never_exceed_the_room(store: &dyn Store) {
    let mut asked = Vec::new();
    for of in 0..20 {
        let name = format!("vm{of}");
        let row = VmRow { host: None, power: PowerState::Stopped, ..vm(100 + of, &name) };
        store.adopt_vm(&row, NOW).await.unwrap();
        let start = power(1000 + of, &row, PowerKind::Start);
        asked.push(NewPower { host: host("b"), room: distinct_room(5), ..start });
    }
    let all = join_all(asked.iter().map(|new| store.admit_power(new, NOW_US))).await;
    let admitted = all.iter().filter(|of| matches!(of, Ok(AdmitPower::Admitted(_)))).count();
    assert_eq!(admitted, 5, "{all:?}");
}

/// Room for so many VMs. One that stands there twice, by its reservation and as owned, counts once.
fn distinct_room(vms: usize) -> Room {
    Room::new(move |reserved| {
        let taken: BTreeSet<VmId> = reserved.iter().map(|of| of.vm).collect();
        if taken.len() < vms { Ok(()) } else { Err(format!("{} reserved", taken.len())) }
    })
}
