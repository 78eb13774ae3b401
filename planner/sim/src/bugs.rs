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
    /// The agent says of a transfer what was true of the one before: that it is completed.
    AgentTellsOldCompletion,
    /// The agent starts a receiver before its journal names it.
    AgentActsBeforeNote,
    /// The agent boots a guest again whose process it did not live to note.
    AgentBootsTwice,
    /// The agent lends the next claim to someone without a planner while a migration is open.
    AgentLendsClaim,
    /// A planner that takes over keeps the claim of the one before.
    PlannerKeepsClaim,
    /// A planner counts a look as an answer to its claim.
    PlannerClaimsUnheard,
    /// A planner takes an agent that does not answer for a QEMU that is gone.
    PlannerTakesSilenceForDeath,
    /// A planner lets the destination go on as soon as it has ordered the switchover.
    PlannerContinuesEarly,
    /// A planner lets the source go on as soon as it has told the receiver to end.
    PlannerResumesEarly,
    /// A planner ends the receiver because the source is dead.
    PlannerDestroysBlindly,
    /// A planner kills an overdue source before it has written that it goes forward.
    PlannerKillsUndecided,
    /// A planner releases the source for its newer generation alone.
    PlannerReleasesEarly,
    /// A VM is lost once its host is silent: it may be started elsewhere.
    StoreTakesSilenceForLoss,
    /// The store carries a transaction out again whose answer was lost.
    StoreCommitsTwice,
    /// The store admits without looking at what is promised already.
    StoreOverbooks,
    /// An operator declares a host dead that runs on.
    OperatorLies,
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
        Self::AgentTellsOldCompletion,
        Self::AgentActsBeforeNote,
        Self::AgentBootsTwice,
        Self::AgentLendsClaim,
        Self::PlannerKeepsClaim,
        Self::PlannerClaimsUnheard,
        Self::PlannerTakesSilenceForDeath,
        Self::PlannerContinuesEarly,
        Self::PlannerResumesEarly,
        Self::PlannerDestroysBlindly,
        Self::PlannerKillsUndecided,
        Self::PlannerReleasesEarly,
        Self::StoreTakesSilenceForLoss,
        Self::StoreCommitsTwice,
        Self::StoreOverbooks,
        Self::OperatorLies,
        Self::StoreWritesAnyway,
        Self::StoreLosesWrites,
    ];
}
