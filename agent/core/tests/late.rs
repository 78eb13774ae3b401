//! Every message of a driver, delivered twice and late, at every place of every script.
//!
//! Between any two messages the agent dies and reads its record again: nothing that matters may be
//! only in memory.

use vmferry_agent_core::fence::{ClaimDecision, Decision, FenceState, digest};
use vmferry_agent_core::journal::VmRecord;
use vmferry_types::{Claim, Fence, Generation, MigrationId, Step, VmId};

const VM: VmId = VmId::from_u128(1);

/// What a driver sends to one agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Claim { migration: u128, generation: u64, claim: u64 },
    Command { migration: u128, generation: u64, claim: u64, step: u64, action: &'static str },
}

/// What an agent makes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reply {
    /// It is new and was carried out.
    Done,
    /// The claim is held, or the command was answered: the first answer again.
    Again(String),
    /// It was begun and never answered: it is carried out again.
    Resumed,
    Refused,
}

/// When an agent dies while it carries a command out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Never,
    BeforeTheAnswer,
}

/// An agent as far as its fence goes, which is dead between any two messages.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Agent {
    disk: Vec<u8>,
    /// Every effect that was let through, in order.
    effects: Vec<String>,
}

impl Agent {
    fn new() -> Self {
        let disk = VmRecord::new(VM).to_json().expect("a new record can be written");
        Self { disk, effects: Vec::new() }
    }

    fn fence(&self) -> FenceState {
        VmRecord::from_json(&self.disk).expect("what was written can be read").fence
    }

    fn write(&mut self, fence: FenceState) {
        let record = VmRecord { fence, ..VmRecord::new(VM) };
        self.disk = record.to_json().expect("a record can be written");
    }

    fn deliver(&mut self, message: Message, death: Death) -> Reply {
        match message {
            Message::Claim { migration, generation, claim } => {
                let migration = MigrationId::from_u128(migration);
                self.claim(migration, Generation::from_stored(generation), claim)
            }
            Message::Command { migration, generation, claim, step, action } => {
                let fence = Fence {
                    vm: VM,
                    migration: MigrationId::from_u128(migration),
                    generation: Generation::from_stored(generation),
                    claim: Claim::from_stored(claim),
                    step: Step::from_stored(step),
                };
                self.command(&fence, action, death)
            }
        }
    }

    fn claim(&mut self, migration: MigrationId, generation: Generation, claim: u64) -> Reply {
        let (mut fence, claim) = (self.fence(), Claim::from_stored(claim));
        let decision = fence.decide_claim(migration, generation, claim);
        match decision {
            ClaimDecision::Refuse(_) => return Reply::Refused,
            ClaimDecision::Take | ClaimDecision::Held => {}
        }
        fence.claim(migration, generation, claim);
        self.write(fence);
        if decision == ClaimDecision::Take { Reply::Done } else { Reply::Again(String::new()) }
    }

    fn command(&mut self, command: &Fence, action: &str, death: Death) -> Reply {
        let mut fence = self.fence();
        let digest = digest(format!("{command:?} {action}").as_bytes());
        let reply = match fence.decide(command, &digest) {
            Decision::Execute => Reply::Done,
            Decision::Resume => Reply::Resumed,
            Decision::Replay { answer } => return Reply::Again(answer),
            Decision::Refuse(_) => return Reply::Refused,
        };
        fence.note(command, digest);
        self.write(fence.clone());
        self.effects.push(action.to_owned());
        if death == Death::Never {
            fence.answer(format!("answer {} to {action}", self.effects.len()));
            self.write(fence);
        }
        reply
    }
}

/// Writes a driver's messages of one claim.
fn driven(
    migration: u128,
    claim: u64,
    first: u64,
    commands: &[(u64, &'static str)],
) -> Vec<Message> {
    let claimed = Message::Claim { migration, generation: first, claim };
    let command = |(step, (generation, action)): (u64, &(u64, &'static str))| Message::Command {
        migration,
        generation: *generation,
        claim,
        step,
        action,
    };
    std::iter::once(claimed).chain((1..).zip(commands).map(command)).collect()
}

/// What an agent hears in its life: moves as either end, to their end and back, with drivers that
/// are followed by others in the middle.
fn scripts() -> Vec<Vec<Message>> {
    let source = [(1, "start_transfer"), (1, "order_switchover"), (2, "release_source")];
    let destination = [(1, "arm_receiver"), (2, "continue_destination")];
    let back = [(1, "start_transfer"), (1, "cancel_transfer")];
    let back_with_proof = [(1, "start_transfer"), (1, "order_switchover"), (1, "resume_source")];
    let receiver = [(1, "arm_receiver"), (1, "destroy_receiver")];
    let killed = [(1, "start_transfer"), (1, "order_switchover"), (1, "kill_source")];
    let held = [(1, "hold_guest"), (1, "start_transfer"), (1, "order_switchover")];
    let power = [(1, "start_vm"), (1, "stop_vm"), (1, "forget_vm")];
    let mut scripts: Vec<Vec<Message>> =
        [&source[..], &destination, &back, &back_with_proof, &receiver, &killed, &held, &power]
            .iter()
            .map(|commands| driven(7, 1, 1, commands))
            .collect();
    // The same, taken over by another driver after each command.
    for commands in [&source[..], &destination, &back_with_proof] {
        for cut in 1..commands.len() {
            let (before, after) = commands.split_at(cut);
            let generation = after[0].0;
            scripts.push([driven(7, 1, 1, before), driven(7, 2, generation, after)].concat());
        }
    }
    // There, and back again under the next admission.
    scripts.push([driven(7, 1, 1, &source), driven(8, 2, 2, &destination_again())].concat());
    scripts
}

fn destination_again() -> [(u64, &'static str); 2] {
    [(2, "arm_receiver"), (3, "continue_destination")]
}

#[test]
fn a_command_that_comes_again_however_late_is_answered_as_it_was_or_refused() {
    for script in scripts() {
        for (at, _) in script.iter().enumerate() {
            for (again, message) in script[..=at].iter().enumerate() {
                let mut agent = Agent::new();
                let answers: Vec<Reply> =
                    script[..=at].iter().map(|sent| agent.deliver(*sent, Death::Never)).collect();
                assert!(answers.iter().all(|reply| *reply == Reply::Done), "{script:?}");
                let before = agent.clone();
                let reply = agent.deliver(*message, Death::Never);
                assert_eq!(agent, before, "{message:?} after {:?}", script[at]);
                match (message, again == at) {
                    (Message::Command { .. }, true) => {
                        let first = format!("answer {} to", before.effects.len());
                        assert!(
                            matches!(&reply, Reply::Again(answer) if answer.starts_with(&first))
                        );
                    }
                    (Message::Command { .. }, false) => assert_eq!(reply, Reply::Refused),
                    (Message::Claim { claim, .. }, _) => {
                        let held = agent.fence().claim == Claim::from_stored(*claim)
                            && agent.fence().migration == migration_of(message);
                        let generation = generation_of(message) == agent.fence().generation;
                        let known = held && generation;
                        assert_eq!(reply != Reply::Refused, known, "{message:?} in {script:?}");
                    }
                }
            }
        }
    }
}

fn migration_of(message: &Message) -> Option<MigrationId> {
    match message {
        Message::Claim { migration, .. } | Message::Command { migration, .. } => {
            Some(MigrationId::from_u128(*migration))
        }
    }
}

fn generation_of(message: &Message) -> Generation {
    match message {
        Message::Claim { generation, .. } | Message::Command { generation, .. } => {
            Generation::from_stored(*generation)
        }
    }
}

#[test]
fn a_script_ends_alike_whatever_comes_twice_or_late_on_its_way() {
    for script in scripts() {
        let mut undisturbed = Agent::new();
        for message in &script {
            undisturbed.deliver(*message, Death::Never);
        }
        for at in 0..script.len() {
            for late in 0..=at {
                let mut agent = Agent::new();
                for (place, message) in script.iter().enumerate() {
                    agent.deliver(*message, Death::Never);
                    if place == at {
                        agent.deliver(script[late], Death::Never);
                    }
                }
                assert_eq!(agent, undisturbed, "{late} again after {at} in {script:?}");
            }
        }
    }
}

#[test]
fn a_command_that_no_answer_was_written_for_is_carried_out_again_and_nothing_else_is() {
    for script in scripts() {
        for at in 0..script.len() {
            let Message::Command { action, .. } = script[at] else { continue };
            let mut agent = Agent::new();
            for message in &script[..at] {
                agent.deliver(*message, Death::Never);
            }
            assert_eq!(agent.deliver(script[at], Death::BeforeTheAnswer), Reply::Done);
            for earlier in &script[..at] {
                if let Message::Command { .. } = earlier {
                    assert_eq!(agent.deliver(*earlier, Death::Never), Reply::Refused);
                }
            }
            assert_eq!(agent.deliver(script[at], Death::Never), Reply::Resumed);
            let answer = agent.deliver(script[at], Death::Never);
            assert!(matches!(answer, Reply::Again(_)), "{answer:?}");
            let twice = agent.effects.iter().filter(|effect| **effect == action).count();
            assert_eq!(twice, 2);
        }
    }
}

#[test]
fn what_arrives_before_its_claim_or_out_of_its_order_takes_the_place_of_what_it_overtook() {
    for script in scripts() {
        for at in 0..script.len() {
            for early in at + 1..script.len() {
                let mut agent = Agent::new();
                for message in &script[..at] {
                    agent.deliver(*message, Death::Never);
                }
                if agent.deliver(script[early], Death::Never) != Reply::Done {
                    continue;
                }
                // Once it was obeyed, what it overtook never is.
                for overtaken in &script[at..early] {
                    let before = agent.effects.clone();
                    agent.deliver(*overtaken, Death::Never);
                    assert_eq!(agent.effects, before, "{overtaken:?} after {:?}", script[early]);
                }
            }
        }
    }
}
