//! What an agent says of its host.

use vmferry_proto::v1::{HostReport, VmReport};

use super::quantity::or_dash;
use super::table::{fields, section, table};

/// Lays out what a host can do, and what it has.
pub(crate) fn capabilities(report: &HostReport) -> String {
    let can = report.capabilities.clone().unwrap_or_default();
    let mut text = fields(&[
        ("host", format!("{} ({})", report.name, report.host_id)),
        ("agent", report.agent_version.clone()),
        ("QEMU", can.qemu_version.clone()),
        ("accelerators", or_dash(&can.accelerators.join(", "))),
        ("bridges", or_dash(&can.bridges.join(", "))),
        ("CPU models", or_dash(&can.cpu_models.join(", "))),
        ("machine types", or_dash(&can.machine_types.join(", "))),
        ("receives at", or_dash(&can.migration_address)),
    ]);
    let row = |vm: &VmReport| {
        vec![or_dash(&vm.vm_name), vm.vm_id.clone(), vm.role.clone(), vm.generation.to_string()]
    };
    let rows = report.vms.iter().map(row).collect();
    text += &section("VMs:", &table(&["NAME", "ID", "ROLE", "GENERATION"], rows, "none"));
    text
}
