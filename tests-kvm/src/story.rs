//! Whether what users are told of a host is true: the command line's table and JSON and the REST
//! API, each held against what the kernel and the guests themselves say at the same moment.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::cluster::{Cluster, GuestVm};
use crate::lab::PLANNER_ADDRESSES;
use crate::rest;
use crate::wait::{Level, wait_for};
use crate::whereabouts::Whereabouts;

/// How long the world may take to stand still while it is described.
const MOMENT_BOUND: Duration = Duration::from_secs(60);

/// What is told of a host, and what was so while it was told.
#[derive(Clone, Debug)]
pub struct Moment {
    /// The host.
    pub host: String,
    /// What `vmferry host show` prints.
    pub table: String,
    /// The same as JSON.
    pub json: Value,
    /// Where the guests were, from before it was told until after.
    pub seen: Whereabouts,
    ids: Vec<(String, String)>,
}

impl Moment {
    /// Asks how a host stands while the world stands still, and holds it against the world. Whoever
    /// is away is asked again; a guest that moves while it is told is waited for.
    ///
    /// # Errors
    ///
    /// Says what is told and not true.
    pub async fn of(cluster: &Cluster<'_>, host: &str, vms: &[Arc<GuestVm>]) -> Result<Self> {
        let address = PLANNER_ADDRESSES[cluster.clients.asked_planner()];
        Self::told_by(cluster, address, host, vms).await
    }

    /// The same, asking the planner at an address.
    ///
    /// # Errors
    ///
    /// Says what is told and not true.
    pub async fn told_by(
        cluster: &Cluster<'_>,
        address: &str,
        host: &str,
        vms: &[Arc<GuestVm>],
    ) -> Result<Self> {
        let what = format!("host {host} to be described while the guests stay where they are");
        let moment = wait_for(what, MOMENT_BOUND, || async {
            let before = Whereabouts::look(cluster, vms).await?;
            let Some(told) = Self::ask(cluster, address, host).await? else {
                return Ok(Level::NotYet("nobody answered, or differently each time".to_owned()));
            };
            let seen = Whereabouts::look(cluster, vms).await?;
            if before != seen {
                return Ok(Level::NotYet(format!("{before:?}, then {seen:?}")));
            }
            let ids = vms.iter().map(|vm| (vm.name.clone(), vm.uuid.to_string())).collect();
            let (table, json) = told;
            Ok(Level::Reached(Self { host: host.to_owned(), table, json, seen, ids }))
        })
        .await?;
        moment.check()?;
        Ok(moment)
    }

    /// Returns the table and the JSON, if both and REST tell the same story.
    async fn ask(
        cluster: &Cluster<'_>,
        address: &str,
        host: &str,
    ) -> Result<Option<(String, Value)>> {
        let json = cluster.cli_at(address, &["host", "show", host, "-o", "json"]).await?;
        let table = cluster.cli_at(address, &["host", "show", host]).await?;
        let path = format!("/api/hosts/{host}");
        let Ok(over_rest) = rest::request(&format!("{address}:9095"), "GET", &path, None).await
        else {
            return Ok(None);
        };
        if !json.status.success() || !table.status.success() || over_rest.status != 200 {
            return Ok(None);
        }
        let json: Value = serde_json::from_slice(&json.stdout).context("read the JSON")?;
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        let same = over_rest.body["story"] == json["story"]
            && texts(&json["story"]).all(|line| table.contains(line));
        Ok(same.then_some((table, json)))
    }

    /// Returns the sentences.
    #[must_use]
    pub fn story(&self) -> String {
        texts(&self.json["story"]).collect::<Vec<_>>().join("; ")
    }

    /// Returns what empties the host, or did last.
    #[must_use]
    pub fn emptying(&self) -> &Value {
        &self.json["emptying"]
    }

    /// Fails unless the story, and so the table, has each of these.
    ///
    /// # Errors
    ///
    /// Says what is not told.
    pub fn tells(&self, parts: &[&str]) -> Result<()> {
        let story = self.story();
        match parts.iter().find(|part| !story.contains(**part)) {
            Some(missing) => bail!("it is not told that {missing:?}:\n{}", self.table),
            None => Ok(()),
        }
    }

    /// Fails if something is told, in whatever words, that is not so.
    fn check(&self) -> Result<()> {
        self.check_vms()?;
        self.check_moves()?;
        self.check_placements()?;
        self.check_blocked()?;
        let empty = ["MAINTENANCE", "EMPTY", "GRANTED"];
        let state = self.emptying()["state"].as_str().unwrap_or_default();
        if empty.contains(&state) && self.seen.on(&self.host).next().is_some() {
            bail!("{state}, and {:?} runs there:\n{}", self.seen.processes, self.table);
        }
        Ok(())
    }

    /// The VMs that are shown there run there, and no other: but for those that something carries.
    fn check_vms(&self) -> Result<()> {
        let shown = self.json["vms"].as_array().map_or(&[][..], Vec::as_slice);
        let carried = |vm: &Value| !text(vm, "migration_id").is_empty();
        for (name, id) in &self.ids {
            let here = shown.iter().find(|vm| text(vm, "id") == id);
            let runs_on = &self.seen.runs_on[name];
            let runs_here = *runs_on == self.host;
            let owned = here.is_some_and(|vm| text(vm, "power") == "running");
            let moves = here.is_some_and(carried) || self.is_carried(id);
            if owned != runs_here && !moves {
                bail!("{name} runs on {runs_on}, shown here: {owned}:\n{}", self.table);
            }
        }
        Ok(())
    }

    fn is_carried(&self, id: &str) -> bool {
        moves(self.emptying()).any(|one| {
            text(one, "vm_id") == id && matches!(text(one, "state"), "running" | "cancelling")
        })
    }

    /// n of m is what was counted, and each VM is where its move says.
    fn check_moves(&self) -> Result<()> {
        let of = self.emptying();
        if of.is_null() || !text(of, "ended").is_empty() {
            return Ok(());
        }
        let left = moves(of).filter(|one| matches!(text(one, "state"), "done" | "left")).count();
        let all = moves(of).count();
        let counted = format!("{left} of {all} VMs have left");
        let told = matches!(text(of, "state"), "RUNNING" | "EMPTYING");
        if told && (!self.story().contains(&counted) || !self.table.contains(&counted)) {
            bail!("{counted}, and that is not told:\n{}", self.table);
        }
        for one in moves(of) {
            let Some((name, id)) = self.ids.iter().find(|(_, id)| text(one, "vm_id") == id) else {
                continue;
            };
            let on = &self.seen.runs_on[name];
            let process_here = self.seen.on(&self.host).any(|process| process.uuid == *id);
            let (state, target) = (text(one, "state"), text(one, "target_host"));
            let here = *on == self.host && process_here;
            let true_ = match state {
                "done" => !process_here && on == target,
                "running" | "cancelling" => *on == self.host || on == target,
                "left" => true,
                _ => here,
            };
            // What a job planned and did not carry out tells nothing of where a VM is.
            if !true_ && (told || state == "done") && !self.is_over() {
                bail!("{name} is {state} towards {target:?} and runs on {on}:\n{}", self.table);
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        matches!(text(self.emptying(), "state"), "COMPLETED" | "CANCELLED")
    }

    /// A host takes placements only while nothing is said against it.
    fn check_placements(&self) -> Result<()> {
        let none = |key: &str| self.json[key].as_array().is_none_or(Vec::is_empty);
        let open = none("blockers") && none("cordons");
        if open != self.story().starts_with("it takes placements") {
            bail!("it is told wrongly whether it takes placements:\n{}", self.table);
        }
        let cordons = self.json["cordons"].as_array().map_or(&[][..], Vec::as_slice);
        for cordon in cordons {
            self.tells(&[text(cordon, "owner"), text(cordon, "reason")])?;
        }
        Ok(())
    }

    /// Each VM that cannot leave is named with every reason, and with what to do.
    fn check_blocked(&self) -> Result<()> {
        let blocked = self.emptying()["blocked"].as_array().map_or(&[][..], Vec::as_slice);
        for one in blocked.iter().filter(|_| text(self.emptying(), "ended").is_empty()) {
            let reasons = one["blockers"].as_array().map_or(&[][..], Vec::as_slice);
            let wanted = ["vm_name", "code", "message", "fix"].map(|key| text(one, key));
            let reasons = reasons.iter().map(|reason| text(reason, "message"));
            for part in wanted.into_iter().chain(reasons) {
                if part.is_empty() || !self.table.contains(part) {
                    bail!("the table lacks {part:?} of {one}:\n{}", self.table);
                }
            }
        }
        Ok(())
    }
}

fn moves(emptying: &Value) -> impl Iterator<Item = &Value> {
    emptying["moves"].as_array().into_iter().flatten()
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn text<'v>(of: &'v Value, key: &str) -> &'v str {
    of[key].as_str().unwrap_or_default()
}
