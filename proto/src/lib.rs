//! The wire contract between agents, planner and their users.
//!
//! Everything in [`v1`] is generated from `v1/*.proto`. Messages also serialise to JSON under
//! their proto names: that is the REST API's body and the CLI's `-o json`.

pub mod refusal;
pub mod reporting;

/// Generated messages, clients and servers.
pub mod v1 {
    #![expect(
        unused_qualifications,
        clippy::all,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        clippy::struct_excessive_bools,
        clippy::too_many_lines,
        reason = "generated code follows its generator's style"
    )]
    tonic::include_proto!("vmferry.v1");
}
