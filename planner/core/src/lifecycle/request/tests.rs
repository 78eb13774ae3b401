use std::fmt::Write as _;

use expect_test::expect_file;

use super::*;

#[test]
fn what_may_be_asked_is_as_reviewed() {
    let host: HostId = "a".parse().unwrap();
    let dead = Presence::Dead { how: "declared".into() };
    let mut text = String::from(
        "How a host stands × what is asked of it: ok, what goes with it, or the refusal's code.\n\n",
    );
    write!(text, "{:<26}", "").unwrap();
    for asked in Asked::ALL {
        write!(text, "{:<20}", asked.label()).unwrap();
    }
    let mut line = |name: &str, standing: Standing<'_>| {
        text.truncate(text.trim_end_matches(' ').len());
        write!(text, "\n{name:<26}").unwrap();
        for asked in Asked::ALL {
            let cell = match may(standing, *asked) {
                Ok(Granted::Alone) => "ok",
                Ok(Granted::Superseding(_)) => "ok, supersedes",
                Ok(Granted::Cancelling(_)) => "ok, cancels drain",
                Err(denied) => {
                    assert!(denied.to_string().contains("host a"), "{denied}");
                    denied.code()
                }
            };
            write!(text, "{cell:<20}").unwrap();
        }
    };
    let free = Standing { host: &host, presence: &Presence::Heard, vms: 3, job: None, drain: None };
    line("in service", free);
    line("silent", Standing { presence: &Presence::Silent, ..free });
    line("dead, with VMs", Standing { presence: &dead, ..free });
    line("dead, without", Standing { presence: &dead, vms: 0, ..free });
    for (name, row) in &job::tests::rows() {
        line(&format!("job {name}"), Standing { job: Some(row), ..free });
    }
    for (name, row) in &drain::tests::rows() {
        line(&format!("drain {name}"), Standing { drain: Some(row), ..free });
    }
    text.truncate(text.trim_end_matches(' ').len());
    text.push('\n');
    expect_file!["table.txt"].assert_eq(&text);
}

#[test]
fn a_second_request_names_the_first() {
    let host: HostId = "a".parse().unwrap();
    let (_, running) = job::tests::rows().into_iter().nth(3).unwrap();
    let standing = Standing {
        host: &host,
        presence: &Presence::Heard,
        vms: 3,
        job: Some(&running),
        drain: None,
    };
    let denied = may(standing, Asked::Execute).unwrap_err();
    assert_eq!(denied, Denied::JobActive { host, job: running.id });
    assert!(denied.to_string().contains(&running.id.to_string()), "{denied}");
}

#[test]
fn an_operator_lifts_their_own_cordon_and_what_is_over_but_nobody_elses() {
    let host: HostId = "a".parse().unwrap();
    let cordon = |owner| Cordon {
        host: host.clone(),
        owner,
        reason: "disks".into(),
        since: Timestamp(0),
        expires: None,
    };
    let named = |name: &str| Owner::Operator { name: name.into() };
    let cordons = [named("alice"), named("bob"), Owner::Job(JobId::from_u128(7))].map(cordon);
    let lifted = lifted(&cordons, &host, "alice", Timestamp(1));
    let owners: Vec<String> = lifted.iter().map(|cordon| cordon.owner.to_string()).collect();
    assert_eq!(owners, ["alice", "job:00000000-0000-0000-0000-000000000007"]);
}
