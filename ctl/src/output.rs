//! The only place that prints.
//!
//! Answers go to standard output, as a table or as the JSON form of the planner's message.
//! Progress and failures go to standard error, so that a pipe sees answers only.

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{self, IsTerminal as _, Write as _};
use vmferry_proto::v1::Migration;

use crate::failure::Failure;
use crate::follow::Update;
use crate::render;

/// How answers are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// The planner's message, one JSON value a line
    Json,
}

/// Prints answers in one format.
#[derive(Debug)]
pub(crate) struct Output {
    format: Format,
}

impl Output {
    pub(crate) const fn new(format: Format) -> Self {
        Self { format }
    }

    /// Prints one answer: `value` as JSON, or the text that `table` makes of it.
    pub(crate) fn answer<T: Serialize>(&self, value: &T, table: impl FnOnce(&T) -> String) {
        match self.format {
            Format::Table => self.text(&table(value)),
            Format::Json => self.text(&json(value)),
        }
    }

    /// Prints text where a table is wanted: JSON readers had it already.
    pub(crate) fn table(&self, text: impl FnOnce() -> String) {
        match self.format {
            Format::Table => self.text(&text()),
            Format::Json => {}
        }
    }

    /// Prints text as it is.
    pub(crate) fn text(&self, text: &str) {
        let mut out = io::stdout().lock();
        let end = if text.ends_with('\n') { "" } else { "\n" };
        if let Err(error) = write!(out, "{text}{end}").and_then(|()| out.flush()) {
            // A reader that went away (`| head`) is no failure of ours.
            if error.kind() != io::ErrorKind::BrokenPipe {
                complain(&format!("print the answer: {error}"));
            }
        }
    }

    /// Prints why the command did not end well.
    pub(crate) fn failure(&self, failure: &Failure) {
        match self.format {
            Format::Table => complain(&failure.report()),
            Format::Json => complain(&failure.report_json()),
        }
    }

    /// Says on standard error how far something is, when that has changed.
    pub(crate) fn progress(&self, told: &mut String, text: &str) {
        if told != text {
            complain(text);
            text.clone_into(told);
        }
    }

    /// Shows a migration as it goes on: a bar on a terminal, else a line for each phase.
    pub(crate) fn live(&self) -> Live {
        if io::stderr().is_terminal() {
            Live::Bar(bar())
        } else {
            Live::Lines { shown: String::new() }
        }
    }

    /// Prints each state as a JSON line where JSON is wanted.
    pub(crate) fn json_line(&self, update: &Update<'_>) {
        if let (Format::Json, Update::State(state)) = (self.format, update) {
            self.text(&json(state));
        }
    }
}

/// Progress of one migration on standard error.
#[derive(Debug)]
pub(crate) enum Live {
    /// One line that is drawn over.
    Bar(ProgressBar),
    /// For a log: a line whenever the phase changes.
    Lines { shown: String },
}

impl Live {
    /// Shows what is new.
    pub(crate) fn show(&mut self, update: &Update<'_>) {
        match (self, update) {
            (Self::Bar(bar), Update::State(state)) => {
                bar.set_position(u64::from(state.progress_percent.min(100)));
                bar.set_message(render::migration::progress(state));
            }
            (Self::Bar(bar), Update::Lost(failure)) => {
                bar.set_message(format!("{failure}; trying again"));
            }
            (Self::Lines { shown }, Update::State(state)) => Self::line(shown, state),
            (Self::Lines { shown }, Update::Lost(failure)) => {
                let text = format!("{failure}; trying again");
                if *shown != text {
                    complain(&text);
                    *shown = text;
                }
            }
        }
    }

    fn line(shown: &mut String, state: &Migration) {
        let key = format!("{} {}", state.phase, state.capacity_note);
        if *shown != key {
            complain(&format!("{}: {}", state.id, render::migration::progress(state)));
            *shown = key;
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(self) {
        match self {
            Self::Bar(bar) => bar.finish_and_clear(),
            Self::Lines { .. } => {}
        }
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(100), ProgressDrawTarget::stderr());
    match ProgressStyle::with_template("[{bar:24}] {percent:>3} %  {wide_msg}") {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_default_style_does) => bar,
    }
}

fn json<T: Serialize>(value: &T) -> String {
    // Strings, numbers, maps with string keys: nothing in a message can fail to be JSON.
    serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"code\":\"{error}\"}}"))
}

fn complain(text: &str) {
    let mut out = io::stderr().lock();
    // There is nowhere left to say that standard error is closed.
    writeln!(out, "{text}").unwrap_or(());
}
