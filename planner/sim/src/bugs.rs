//! Mistakes made on purpose: a simulation that does not find them would not find others.
//!
//! They are made only in builds with the feature `deliberate-bugs`. Each is one that nothing else
//! in the agent or the planner makes good.

/// One mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bug {
    /// The agent obeys whatever arrives.
    AgentSkipsFence,
    /// The agent obeys a step that is older than the last one.
    AgentObeysDelayedStep,
    /// The agent carries an answered command out again.
    AgentForgetsAnswers,
    /// The agent takes an older claim.
    AgentTakesOlderClaim,
    /// The agent does not note the order before QEMU hears it.
    AgentForgetsOrder,
    /// The agent does not note that it continued the receiver.
    AgentForgetsCont,
    /// After a restart the agent keeps no hold limit.
    AgentForgetsHold,
    /// A lost journal is an empty one.
    AgentTrustsLostJournal,
    /// A silent monitor is a process that is gone.
    AgentTakesSilenceForDeath,
    /// A restarted agent finds every process gone that it did not start.
    AgentForgetsProcesses,
    /// The agent says that a receiver is gone before it is.
    AgentLiesAboutGone,
    /// The tap of an ended receiver stays.
    AgentLeaksTap,
    /// A restarted agent lets everything go on that stands still.
    AgentStartsBySelf,
    /// A planner that takes over keeps the claim of the one before.
    PlannerKeepsClaim,
    /// A planner counts a look as an answer to its claim.
    PlannerClaimsUnheard,
    /// A planner takes an agent that does not answer for a QEMU that is gone.
    PlannerTakesSilenceForDeath,
    /// A planner lets the destination go on as soon as it has ordered the switchover.
    PlannerContinuesEarly,
    /// The store writes a row that was decided on an older one.
    StoreWritesAnyway,
    /// The store says that a row is written, and it is not always.
    StoreLosesWrites,
}

impl Bug {
    /// Every mistake.
    pub const ALL: &[Self] = &[
        Self::AgentSkipsFence,
        Self::AgentObeysDelayedStep,
        Self::AgentForgetsAnswers,
        Self::AgentTakesOlderClaim,
        Self::AgentForgetsOrder,
        Self::AgentForgetsCont,
        Self::AgentForgetsHold,
        Self::AgentTrustsLostJournal,
        Self::AgentTakesSilenceForDeath,
        Self::AgentForgetsProcesses,
        Self::AgentLiesAboutGone,
        Self::AgentLeaksTap,
        Self::AgentStartsBySelf,
        Self::PlannerKeepsClaim,
        Self::PlannerClaimsUnheard,
        Self::PlannerTakesSilenceForDeath,
        Self::PlannerContinuesEarly,
        Self::StoreWritesAnyway,
        Self::StoreLosesWrites,
    ];
}
