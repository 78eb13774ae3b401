//! Which hosts speak of a VM: found without a look at what all of them say.

use std::collections::BTreeMap;

use vmferry_proto::v1::HostReport;
use vmferry_types::{HostId, VmId};

/// The hosts whose last report names a VM, by VM.
#[derive(Debug, Default)]
pub(super) struct Speakers(BTreeMap<VmId, Vec<HostId>>);

impl Speakers {
    /// Returns the hosts that speak of a VM.
    pub(super) fn of(&self, vm: VmId) -> &[HostId] {
        self.0.get(&vm).map_or(&[], Vec::as_slice)
    }

    /// Replaces what a host said before by what it says now; `None` is nothing.
    pub(super) fn turn(
        &mut self,
        host: &HostId,
        before: Option<&HostReport>,
        now: Option<&HostReport>,
    ) {
        let of = |report: Option<&HostReport>| -> Vec<VmId> {
            let vms = report.map_or(&[][..], |report| &report.vms);
            vms.iter().filter_map(|vm| vm.vm_id.parse().ok()).collect()
        };
        if let (Some(before), Some(now)) = (before, now)
            && before.vms.len() == now.vms.len()
            && before.vms.iter().zip(&now.vms).all(|(before, now)| before.vm_id == now.vm_id)
        {
            return;
        }
        for vm in of(before) {
            let Some(hosts) = self.0.get_mut(&vm) else { continue };
            hosts.retain(|other| other != host);
            if hosts.is_empty() {
                self.0.remove(&vm);
            }
        }
        for vm in of(now) {
            let hosts = self.0.entry(vm).or_insert_with(|| Vec::with_capacity(1));
            if let Err(at) = hosts.binary_search(host) {
                hosts.insert(at, host.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use vmferry_proto::v1::VmReport;

    use super::*;

    #[test]
    fn a_vm_is_spoken_of_by_those_whose_last_report_names_it() {
        let (a, b): (HostId, HostId) = ("a".parse().unwrap(), "b".parse().unwrap());
        let vm = |number| VmId::from_u128(number);
        let named = |number| VmReport { vm_id: vm(number).to_string(), ..VmReport::default() };
        let said = |numbers: &[u128]| HostReport {
            vms: numbers.iter().map(|number| named(*number)).collect(),
            ..HostReport::default()
        };
        let mut speakers = Speakers::default();
        speakers.turn(&b, None, Some(&said(&[1, 2])));
        speakers.turn(&a, None, Some(&said(&[2])));
        assert_eq!(speakers.of(vm(1)), std::slice::from_ref(&b));
        assert_eq!(speakers.of(vm(2)), [a.clone(), b.clone()]);
        speakers.turn(&b, Some(&said(&[1, 2])), Some(&said(&[3, 1])));
        assert_eq!(speakers.of(vm(2)), std::slice::from_ref(&a));
        assert_eq!(speakers.of(vm(3)), std::slice::from_ref(&b));
        speakers.turn(&b, Some(&said(&[3, 1])), None);
        assert!(speakers.of(vm(1)).is_empty() && speakers.of(vm(3)).is_empty());
    }
}
