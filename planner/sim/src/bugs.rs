//! Mistakes made on purpose: a simulation that does not find them would not find others.
//!
//! They are made only in builds with the feature `deliberate-bugs`. Each is one that nothing else
//! in the agent or the planner makes good. Those that every tool of this kind has to fear:
//!
//! | the mistake | here |
//! |---|---|
//! | the source resumes before the receiver's end is acknowledged | [`PlannerResumesEarly`](Bug::PlannerResumesEarly) |
//! | the fence is not checked | [`AgentSkipsFence`](Bug::AgentSkipsFence), [`AgentTakesOlderClaim`](Bug::AgentTakesOlderClaim) |
//! | a transaction is committed twice | [`StoreCommitsTwice`](Bug::StoreCommitsTwice) |
//! | something is done before it is written | [`AgentActsBeforeNote`](Bug::AgentActsBeforeNote), [`AgentForgetsOrder`](Bug::AgentForgetsOrder), [`PlannerContinuesEarly`](Bug::PlannerContinuesEarly) |
//! | a time-out counts as gone | [`PlannerTakesSilenceForDeath`](Bug::PlannerTakesSilenceForDeath), [`AgentTakesSilenceForDeath`](Bug::AgentTakesSilenceForDeath) |
//! | a hold is forgotten on restart | [`AgentForgetsHold`](Bug::AgentForgetsHold), [`AgentStartsBySelf`](Bug::AgentStartsBySelf) |
//! | the receiver is destroyed while the source is dead | [`PlannerDestroysBlindly`](Bug::PlannerDestroysBlindly) |
//! | the source is killed before the decision forward is written | [`PlannerKillsUndecided`](Bug::PlannerKillsUndecided) |
//! | `completed` of an earlier attempt counts for this one | [`AgentTellsOldCompletion`](Bug::AgentTellsOldCompletion) |
//! | the source is released for its newer generation alone | [`PlannerReleasesEarly`](Bug::PlannerReleasesEarly) |
//! | a delayed step of the same claim is obeyed | [`AgentObeysDelayedStep`](Bug::AgentObeysDelayedStep) |
//! | a takeover decides before both agents answered its claim | [`PlannerClaimsUnheard`](Bug::PlannerClaimsUnheard), [`PlannerKeepsClaim`](Bug::PlannerKeepsClaim) |
//! | a row is taken from a planner whose lease has not ended | [`StoreBreaksLeases`](Bug::StoreBreaksLeases) |
//! | a planner writes though its row was taken over | [`StoreWritesAnyway`](Bug::StoreWritesAnyway) |
//! | a VM is moved by hand while a migration of it is open | [`AgentLendsClaim`](Bug::AgentLendsClaim) |
//! | a VM is started elsewhere while its host is merely silent | [`StoreTakesSilenceForLoss`](Bug::StoreTakesSilenceForLoss), [`OperatorLies`](Bug::OperatorLies) |
//! | a host that is emptied is a destination | [`StoreForgetsCordons`](Bug::StoreForgetsCordons) |
//! | a lost journal reads as an empty host | [`AgentTrustsLostJournal`](Bug::AgentTrustsLostJournal) |

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
    /// The store knows of no cordon, and of no host that is being emptied.
    StoreForgetsCordons,
    /// The store gives a row to whoever asks, whoever holds it.
    StoreBreaksLeases,
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
        Self::StoreForgetsCordons,
        Self::StoreBreaksLeases,
        Self::OperatorLies,
        Self::StoreWritesAnyway,
        Self::StoreLosesWrites,
    ];
}
