//! Tests of the examples. Each is started as a user starts it, on a socket of its own.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

mod axum;
#[path = "../../../threshold-server/tests/readme/console.rs"]
mod console;
mod guide;
mod login;
mod mailer;
mod outside;
mod pages;
mod programs;
mod running;
mod weather;
mod webhook;
