//! `cargo xtask book`: makes a book from the pages in `docs/`, in `target/book/`.

use std::process::Command;

use anyhow::Result;
use rgpu_tests::tree;

use crate::progress::Step;
use crate::{process, toolchain};

/// Builds the book.
pub fn book() -> Result<()> {
    let mdbook = toolchain::mdbook()?;
    let step = Step::spinner("making the book");
    let mut command = Command::new(mdbook);
    command.arg("build").arg(tree::root().join("docs")).arg("--dest-dir").arg(tree::target().join("book"));
    process::watch(&mut command, &process::log("book")?, &step)?;
    step.done(&tree::target().join("book/index.html").display().to_string());
    Ok(())
}
