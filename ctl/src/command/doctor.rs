//! `vmferry doctor`.

use vmferry_proto::v1::DoctorReply;

use crate::client::Client;
use crate::failure::Failure;
use crate::output::Output;
use crate::render;

pub(crate) async fn run(vm: &str, client: &Client, output: &Output) -> Result<(), Failure> {
    let reply = client.doctor(vm).await?;
    output.answer(&reply, render::doctor::show);
    if reply.well { Ok(()) } else { Err(ill(&reply)) }
}

fn ill(reply: &DoctorReply) -> Failure {
    let errors: Vec<&str> = reply
        .findings
        .iter()
        .filter(|finding| finding.severity == "error")
        .map(|finding| finding.code.as_str())
        .collect();
    Failure::NeedsHuman {
        operation: "doctor".to_owned(),
        cause: format!("{} finding(s): {}", errors.len(), errors.join(", ")),
        advice: "each finding above says what to do".to_owned(),
    }
}
