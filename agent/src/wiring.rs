//! What this host has of a VM's network, as the kernel and the journal say.

use vmferry_agent_core::definition::{Definition, Nic};
use vmferry_agent_core::journal::Part;
use vmferry_proto::v1;

use crate::clock;
use crate::error::CommandError;
use crate::live::Shared;
use crate::network::{self, Tap, Up};
use crate::observe;

/// Returns what this host has of a VM's ports.
pub(crate) async fn of(shared: &Shared) -> Result<v1::VmPorts, CommandError> {
    let record = shared.record.borrow().clone();
    let sight = shared.sight.borrow().clone();
    let (defined, process) = match &record.part {
        Part::Absent => (None, None),
        Part::Stopped { defined, .. } => (Some(defined), None),
        Part::Running { defined, process, .. } | Part::Receiver { defined, process, .. } => {
            (Some(defined), Some(process))
        }
    };
    let vm = defined
        .map(|defined| Definition::parse(&defined.text))
        .transpose()
        .map_err(|errors| CommandError::invalid("definition", errors.to_string()))?;
    let nics = vm.map(|vm| vm.nics).unwrap_or_default();
    let names = process.map(|process| process.taps.clone()).unwrap_or_default();
    let there = network::taps(&names)
        .await
        .map_err(|error| CommandError::failed("look at the taps of the VM", &error))?;
    let announced_ms = process.map_or(0, |process| process.announced_ms);
    let runs = sight.gone.is_none() && sight.running();
    let ports = nics.iter().enumerate().map(|(at, nic)| {
        let name = names.get(at).cloned().unwrap_or_default();
        let guest = Guest { runs, announced_ms };
        port(nic, name.clone(), there.get(&name), guest)
    });
    Ok(v1::VmPorts {
        role: observe::role(&record, &sight).label().to_owned(),
        run_state: sight.run_state.as_ref().map(ToString::to_string).unwrap_or_default(),
        ports: ports.collect(),
        observed_at_ms: clock::wall_ms(),
    })
}

/// What is known of the guest behind a port.
#[derive(Clone, Copy, Debug)]
struct Guest {
    runs: bool,
    announced_ms: u64,
}

fn port(nic: &Nic, name: String, tap: Option<&Tap>, guest: Guest) -> v1::Port {
    let shown = v1::Port {
        nic: nic.id.clone(),
        mac: nic.mac.to_string(),
        bridge: nic.bridge.clone(),
        ..v1::Port::default()
    };
    let Some(tap) = tap else {
        return v1::Port { state: "absent".to_owned(), ..shown };
    };
    let trouble = if tap.bridge != nic.bridge {
        format!("the tap {name} is not on the bridge {}", nic.bridge)
    } else if tap.up == Up::No {
        format!("the tap {name} is down, or no QEMU has it open")
    } else {
        String::new()
    };
    let state = match (guest.runs && trouble.is_empty(), guest.announced_ms) {
        (false, _) => "silent",
        (true, 0) => "wired",
        (true, _) => "announced",
    };
    let announced_at_ms = if guest.runs { guest.announced_ms } else { 0 };
    v1::Port {
        tap: name,
        bridge: tap.bridge.clone(),
        mtu: tap.mtu,
        state: state.to_owned(),
        announced_at_ms,
        trouble,
        ..shown
    }
}
