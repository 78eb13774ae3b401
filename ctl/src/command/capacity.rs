//! `vmferry capacity`.

use clap::Args;
use vmferry_proto::v1::{CapacityReply, CapacityRequest};

use crate::client::Client;
use crate::failure::Failure;
use crate::output::{Format, Output};
use crate::render;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Show where the VMs of this host would go if it were lost
    #[arg(long, value_name = "HOST", default_value = "", hide_default_value = true)]
    without: String,
    /// Show how many more VMs of this size fit, such as 4GiB,2; with --without, how many fit then
    #[arg(long, value_name = "MEM,CPU", value_parser = size)]
    fit: Option<Size>,
    /// The same as --output json
    #[arg(long)]
    json: bool,
}

/// The size of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    memory_bytes: u64,
    cpu_milli: u64,
}

/// Reads a size: memory with its unit, and vCPUs with at most three decimals.
fn size(text: &str) -> Result<Size, String> {
    let (memory, cpu) =
        text.split_once(',').ok_or_else(|| "write it as MEM,CPU, for example 4GiB,2".to_owned())?;
    let memory_bytes = memory_bytes(memory.trim())?;
    let cpu_milli = cpu_milli(cpu.trim()).ok_or_else(|| format!("{cpu} is no number of vCPUs"))?;
    Ok(Size { memory_bytes, cpu_milli })
}

fn memory_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u32); 4] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];
    let wrong = || format!("{text} is no size; write for example 512MiB or 4GiB");
    let (number, shift) = UNITS
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
        .ok_or_else(wrong)?;
    let number: u64 = number.trim().parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(wrong)
}

fn cpu_milli(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    if part.len() > 3 || !part.chars().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let part: u64 = format!("{part:0<3}").parse().ok()?;
    whole.checked_mul(1000)?.checked_add(part)
}

pub(crate) async fn run(
    arguments: Arguments,
    client: &Client,
    output: &Output,
) -> Result<(), Failure> {
    let Arguments { without, fit, json } = arguments;
    let size = fit.unwrap_or(Size { memory_bytes: 0, cpu_milli: 0 });
    let request = CapacityRequest {
        without,
        fit_memory_bytes: size.memory_bytes,
        fit_cpu_milli: size.cpu_milli,
    };
    let reply = client.capacity(request).await?;
    if json {
        Output::new(Format::Json).answer(&reply, render::capacity::show);
    } else {
        output.answer(&reply, render::capacity::show);
    }
    verdict(&reply)
}

/// A host that cannot be lost is a blocker.
fn verdict(reply: &CapacityReply) -> Result<(), Failure> {
    match &reply.without {
        Some(loss) if !loss.can_be_lost => Err(Failure::Blocked {
            operation: format!("lose host {}", loss.host),
            problem: format!(
                "{} of its {} VMs have no place elsewhere",
                loss.blocked.len(),
                loss.blocked.len() + loss.placed.len()
            ),
        }),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_memory_with_a_unit_and_cpus() {
        let size = |text| size(text).map(|size| (size.memory_bytes, size.cpu_milli));
        assert_eq!(size("4GiB,2"), Ok((4 << 30, 2000)));
        assert_eq!(size("512 MiB, 0.5"), Ok((512 << 20, 500)));
        for text in ["4GiB", "4,2", "0GiB,1", "4GiB,x", "4GiB,1.2345", "-1GiB,1", "99999999TiB,1"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
