//! A plot of curves, as SVG.

use std::fmt::Write;

use super::report::bytes;

/// Name, colour, dashed, values.
pub type Curve = (String, usize, bool, Vec<f64>);

/// A plot with a logarithmic x axis.
pub fn plot(title: &str, unit: &str, x: &[f64], curves: &[Curve]) -> String {
    const COLOURS: [&str; 5] = ["#000", "#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00"];
    let (left, right, top, bottom) = (70.0, 560.0, 40.0, 380.0);
    let most = curves.iter().flat_map(|curve| &curve.3).copied().fold(1.0, f64::max) * 1.05;
    let span = (x[x.len() - 1] / x[0]).ln();
    let at = |x0: f64, y: f64| {
        (left + (x0 / x[0]).ln() / span * (right - left), bottom - y / most * (bottom - top))
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 820 440\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"820\" height=\"440\" fill=\"#fff\"/>\n<text x=\"{left}\" y=\"22\" font-size=\"15\">{title}</text>\n<text x=\"{left}\" y=\"425\">{unit}</text>\n"
    );
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let y = at(x[0], value).1;
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{value:.0} MB/s</text>",
            left - 4.0,
            y + 4.0
        );
    }
    for value in x {
        let label = if *value >= 1024.0 { bytes(*value as u64) } else { format!("{value}") };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"400\" text-anchor=\"middle\">{label}</text>",
            at(*value, 0.0).0
        );
    }
    for (i, (name, colour, dashed, values)) in curves.iter().enumerate() {
        let points: String = x
            .iter()
            .zip(values)
            .map(|(x, y)| {
                let (px, py) = at(*x, *y);
                format!("{px:.1},{py:.1} ")
            })
            .collect();
        let stroke = format!(
            "stroke=\"{}\"{}",
            COLOURS[colour % COLOURS.len()],
            if *dashed { " stroke-dasharray=\"5 4\"" } else { "" }
        );
        let y = top + 18.0 * i as f64;
        let _ = writeln!(
            svg,
            "<polyline points=\"{points}\" fill=\"none\" stroke-width=\"2\" {stroke}/>\n<line x1=\"580\" y1=\"{y}\" x2=\"610\" y2=\"{y}\" stroke-width=\"2\" {stroke}/><text x=\"616\" y=\"{}\">{name}</text>",
            y + 4.0
        );
    }
    svg + "</svg>\n"
}
