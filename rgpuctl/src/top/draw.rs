//! Draws the screen. 80 columns and 24 lines are enough; a larger terminal shows more.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::views::{App, Cell, Column, Row, View};

/// Maximum lines about the daemons and the sockets that do not answer.
const SUMMARY: usize = 3;

/// Draws everything. On a page beyond the last row, the app scrolls back.
pub fn draw(frame: &mut Frame<'_>, app: &mut App) {
    let mut summary = app.summary();
    summary.truncate(SUMMARY);
    let lines = summary.len() as u16;
    let [top, tabs, head, body, foot] = Layout::vertical([
        Constraint::Length(lines),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(summary.into_iter().map(Line::from).collect::<Vec<_>>()), top);
    frame.render_widget(Paragraph::new(views(app)), tabs);
    let widths = widths(app.view.columns(), head.width);
    frame.render_widget(Paragraph::new(heading(app, &widths)), head);
    rows(frame, app, &widths, body);
    let keys = " 1-4 view   ←→ sort   r reverse   ↑↓ scroll   p pause   q quit";
    let paused = if app.paused { "   PAUSED" } else { "" };
    let foot_line = Line::styled(format!("{keys}{paused}"), Style::new().add_modifier(Modifier::DIM));
    frame.render_widget(Paragraph::new(foot_line), foot);
}

fn views(app: &App) -> Line<'static> {
    let mut spans = Vec::new();
    for (number, view) in View::ALL.into_iter().enumerate() {
        let style =
            if view == app.view { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        spans.push(Span::styled(format!(" {} {} ", number + 1, view.name()), style));
        spans.push(Span::raw(" "));
    }
    spans.push(Span::raw(format!("{} rows", app.rows.len())));
    Line::from(spans)
}

/// The width of each column. Columns with words share the remaining width.
fn widths(columns: &[Column], width: u16) -> Vec<usize> {
    let least: u16 = columns.iter().map(|column| column.width + 1).sum::<u16>().saturating_sub(1);
    let texts = columns.iter().filter(|column| column.text).count().max(1) as u16;
    let more = width.saturating_sub(least) / texts;
    columns.iter().map(|column| usize::from(column.width + if column.text { more } else { 0 })).collect()
}

/// A text with this many characters: aligned, or cut with an ellipsis.
fn fit(text: &str, width: usize, left: bool) -> String {
    let length = text.chars().count();
    if length > width {
        let cut: String = text.chars().take(width.saturating_sub(1)).collect();
        return format!("{cut}…");
    }
    if left { format!("{text:<width$}") } else { format!("{text:>width$}") }
}

fn heading(app: &App, widths: &[usize]) -> Line<'static> {
    let sorting = app.sorting();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut spans = Vec::new();
    for (place, (column, width)) in app.view.columns().iter().zip(widths).enumerate() {
        let style = if place == sorting.column { bold.add_modifier(Modifier::REVERSED) } else { bold };
        spans.push(Span::styled(fit(column.name, *width, column.text), style));
        spans.push(Span::raw(" "));
    }
    Line::from(spans)
}

fn rows(frame: &mut Frame<'_>, app: &mut App, widths: &[usize], area: Rect) {
    let height = usize::from(area.height);
    // The last page is full.
    app.offset = app.offset.min(app.rows.len().saturating_sub(height));
    let (app, offset) = (&*app, app.offset);
    let columns = app.view.columns();
    let line = |row: &Row| {
        let cells = row.iter().zip(columns).zip(widths);
        let shown = cells.map(|((cell, column), width)| {
            let width = *width;
            fit(&cell.shown(), width, column.text && !matches!(cell, Cell::Unknown))
        });
        Line::raw(shown.collect::<Vec<_>>().join(" "))
    };
    let lines: Vec<Line<'_>> = app.rows.iter().skip(offset).take(height).map(line).collect();
    frame.render_widget(Paragraph::new(lines), area);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_view_fits_80_columns() {
        for view in View::ALL {
            let used: usize = widths(view.columns(), 80).iter().map(|width| width + 1).sum::<usize>() - 1;
            assert!(used <= 80, "{view:?} takes {used}");
            let wide: usize = widths(view.columns(), 200).iter().map(|width| width + 1).sum::<usize>() - 1;
            assert!((181..=200).contains(&wide), "{view:?} takes {wide} of 200");
            assert!(
                view.columns().iter().all(|column| column.name.chars().count() <= usize::from(column.width))
            );
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_with_an_ellipsis() {
        assert_eq!(fit("abcdef", 4, true), "abc…");
        assert_eq!((fit("ab", 4, true), fit("ab", 4, false)), ("ab  ".into(), "  ab".into()));
    }
}
