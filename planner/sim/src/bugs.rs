//! Mistakes made on purpose: a simulation that does not find them would not find others.
//!
//! They exist only in builds with the feature `deliberate-bugs`.

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
    /// The agent lets an ordered source go on without the proof that the receiver is gone.
    AgentResumesWithoutProof,
    /// The agent does not note the order before QEMU hears it.
    AgentForgetsOrder,
    /// The agent does not note that it gave up.
    AgentForgetsGivingUp,
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
    /// The agent arms a second receiver for one that it ended.
    AgentArmsAgain,
    /// The agent says that a receiver is gone before it is.
    AgentLiesAboutGone,
    /// What QEMU says of an earlier attempt is taken for this one.
    AgentMixesAttempts,
    /// The tap of an ended receiver stays.
    AgentLeaksTap,
    /// The agent goes on at the source by itself after a restart.
    AgentStartsBySelf,
    /// A receiver that has not everything is continued.
    AgentContinuesEarly,
    /// A source is released under the generation that it runs under.
    AgentReleasesOwner,
    /// A planner that takes over keeps the claim of the one before.
    PlannerKeepsClaim,
    /// A planner counts a look as an answer to its claim.
    PlannerClaimsUnheard,
    /// A planner takes an agent that does not answer for a QEMU that is gone.
    PlannerTakesSilenceForDeath,
    /// The store writes a row that was decided on an older one.
    StoreWritesAnyway,
    /// The store does not count what is reserved when it grants.
    StoreForgetsReservations,
}

impl Bug {
    /// Every mistake.
    pub const ALL: &[Self] = &[
        Self::AgentSkipsFence,
        Self::AgentObeysDelayedStep,
        Self::AgentForgetsAnswers,
        Self::AgentTakesOlderClaim,
        Self::AgentResumesWithoutProof,
        Self::AgentForgetsOrder,
        Self::AgentForgetsGivingUp,
        Self::AgentForgetsCont,
        Self::AgentForgetsHold,
        Self::AgentTrustsLostJournal,
        Self::AgentTakesSilenceForDeath,
        Self::AgentForgetsProcesses,
        Self::AgentArmsAgain,
        Self::AgentLiesAboutGone,
        Self::AgentMixesAttempts,
        Self::AgentLeaksTap,
        Self::AgentStartsBySelf,
        Self::AgentContinuesEarly,
        Self::AgentReleasesOwner,
        Self::PlannerKeepsClaim,
        Self::PlannerClaimsUnheard,
        Self::PlannerTakesSilenceForDeath,
        Self::StoreWritesAnyway,
        Self::StoreForgetsReservations,
    ];
}
