//! Draws a terminal's screen as SVG.

use std::fmt::Write;

use anyhow::{Result, ensure};
use rgpu_tests::terminal::{COLUMNS, LINES};
use vt100::{Cell, Color, Screen};

/// Size of a character, and the space around all of them.
const WIDTH: u16 = 8;
const HEIGHT: u16 = 17;
const BORDER: u16 = 12;
const PAPER: &str = "#14181f";
const INK: &str = "#d8dee9";

/// The style of a piece of a line.
#[derive(Clone, Copy, Default, PartialEq)]
struct Look {
    bold: bool,
    dim: bool,
    inverse: bool,
}

impl Look {
    fn of(cell: &Cell) -> Look {
        Look { bold: cell.bold(), dim: cell.dim(), inverse: cell.inverse() }
    }
}

/// Draws a screen without colors, since rgpuctl uses none.
pub fn draw(screen: &Screen, title: &str) -> Result<String> {
    let (width, height) = (COLUMNS * WIDTH + 2 * BORDER, LINES * HEIGHT + 2 * BORDER);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"'DejaVu Sans Mono', Menlo, Consolas, monospace\" font-size=\"13\" fill=\"{INK}\">\n<title>{title}</title>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"{PAPER}\"/>\n"
    );
    for line in 0..LINES {
        let mut pieces: Vec<(u16, Look, String)> = Vec::new();
        for column in 0..COLUMNS {
            let Some(cell) = screen.cell(line, column) else { continue };
            let plain = cell.fgcolor() == Color::Default && cell.bgcolor() == Color::Default;
            ensure!(plain && !cell.is_wide(), "column {column} of line {line} has a color, or is wide");
            let look = Look::of(cell);
            let text = if cell.has_contents() { cell.contents() } else { " " };
            match pieces.last_mut() {
                Some((_, before, piece)) if *before == look => piece.push_str(text),
                _ => pieces.push((column, look, text.to_owned())),
            }
        }
        for (column, look, text) in pieces {
            piece(&mut svg, column, line, look, &text);
        }
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

/// Appends a piece of a line.
fn piece(svg: &mut String, column: u16, line: u16, look: Look, text: &str) {
    let length = |text: &str| u16::try_from(text.chars().count()).unwrap_or(COLUMNS) * WIDTH;
    let (x, top) = (BORDER + column * WIDTH, BORDER + line * HEIGHT);
    // Writing to a string does not fail.
    if look.inverse {
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"{top}\" width=\"{}\" height=\"{HEIGHT}\"/>", length(text));
    }
    let (shown, blank) = (text.trim(), text.len() - text.trim_start().len());
    if shown.is_empty() {
        return;
    }
    let mut style = String::new();
    if look.bold {
        style += " font-weight=\"bold\"";
    }
    if look.dim {
        style += " opacity=\"0.6\"";
    }
    if look.inverse {
        let _ = write!(style, " fill=\"{PAPER}\"");
    }
    let escaped = shown.replace('&', "&amp;").replace('<', "&lt;");
    let (x, y) = (x + length(&text[..blank]), top + HEIGHT - 4);
    // The length keeps columns straight in any font.
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" textLength=\"{}\" xml:space=\"preserve\"{style}>{escaped}</text>",
        length(shown)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZero;

    fn screen(text: &str) -> Screen {
        let size = |number| NonZero::new(number).unwrap();
        let mut parser = vt100::Parser::new(size(LINES), size(COLUMNS), 0);
        parser.process(text.as_bytes());
        parser.screen().clone()
    }

    #[test]
    fn pieces_are_at_their_places_in_the_terminal() {
        let svg = draw(&screen("one\r\n  \x1b[1mtwo & <3\x1b[0m  \x1b[7m 4 \x1b[0m"), "a title").unwrap();
        assert!(
            svg.contains("<text x=\"12\" y=\"25\" textLength=\"24\" xml:space=\"preserve\">one</text>"),
            "{svg}"
        );
        let bold = "<text x=\"28\" y=\"42\" textLength=\"64\" xml:space=\"preserve\" font-weight=\"bold\">two &amp; &lt;3</text>";
        assert!(svg.contains(bold), "{svg}");
        assert!(svg.contains("<rect x=\"108\" y=\"29\" width=\"24\" height=\"17\"/>"), "{svg}");
    }

    #[test]
    fn a_color_is_an_error() {
        assert!(draw(&screen("\x1b[31mred"), "").is_err());
    }
}
