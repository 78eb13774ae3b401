//! One life of one planner: what it does ends with it, wherever it was.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::CancellationToken;
use vmferry_planner::clock::simulated::Machine;
use vmferry_planner::shutdown::Shutdown;

use crate::world::{Mishap, PointKind, World};

/// One life of a planner.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) world: World,
    /// Which of the planners it is.
    pub(crate) number: u32,
    pub(crate) token: CancellationToken,
    pub(crate) shutdown: Shutdown,
    /// What it runs on.
    pub(crate) machine: Arc<Machine>,
    dead: AtomicBool,
}

/// What a call that is about to be made comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Goes,
    /// The planner dies once it was carried out.
    DiesAfter,
    /// Something else is wrong with it.
    Mishap(Mishap),
}

impl Life {
    pub(crate) fn new(world: World, number: u32) -> Arc<Self> {
        let machine = world.with(|state| state.machine(number));
        Arc::new(Self {
            machine,
            world,
            number,
            token: CancellationToken::new(),
            shutdown: Shutdown::default(),
            dead: AtomicBool::new(false),
        })
    }

    pub(crate) fn is_over(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Ends it: nothing of it runs on, and nothing more leaves it.
    pub(crate) fn end(&self) {
        if self.dead.swap(true, Ordering::Relaxed) {
            return;
        }
        self.world.with(|state| {
            state.counts.planner_deaths += 1;
            let number = self.number;
            state.note(|| format!("planner {number} dies"));
        });
        self.shutdown.request();
        self.token.cancel();
    }

    /// Comes before each call that leaves the planner.
    pub(crate) async fn before(&self, kind: PointKind, what: &'static str) -> Fate {
        if self.is_over() {
            return std::future::pending().await;
        }
        let (told, by_chance, first) = self.world.with(|state| {
            let told = state.point(kind, what);
            if let Some(mishap) = told {
                state.strike(mishap);
            }
            let storm = state.at_ms() < state.weather.calm_at_ms;
            let odds = state.weather.planner_dies;
            (told, storm && state.dice.planner.chance(odds), state.dice.planner.chance(500))
        });
        let fate = match told {
            Some(Mishap::PlannerDiesBefore) => None,
            Some(Mishap::PlannerDiesAfter) => Some(Fate::DiesAfter),
            Some(mishap) => Some(Fate::Mishap(mishap)),
            None if by_chance && first => None,
            None if by_chance => Some(Fate::DiesAfter),
            None => Some(Fate::Goes),
        };
        match fate {
            Some(fate) => fate,
            None => {
                self.end();
                std::future::pending().await
            }
        }
    }

    /// Comes after each call, before the planner hears what came of it.
    pub(crate) async fn after(&self, fate: Fate) {
        if fate == Fate::DiesAfter {
            self.end();
        }
        if self.is_over() {
            std::future::pending::<()>().await;
        }
    }
}
