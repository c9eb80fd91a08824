//! From samples to figures and tables.

use tidekv_core::geometry::Layout;
use tidekv_core::units::Bytes;
use tidekv_mem::Capabilities;

use super::Plan;
use super::calls::PageSizeTimes;
use super::layouts::LayoutTimes;
use super::threads::ThreadRates;
use crate::result::BenchResult;
use crate::stats::{Samples, median_ratio, to_f64};
use crate::table::{Table, format_figure, format_ns, latency_table};

/// Puts samples and figures into the result.
pub(super) fn fill(
    result: &mut BenchResult,
    sizes: &[PageSizeTimes],
    threads: Option<&ThreadRates>,
    layouts: &[LayoutTimes],
) {
    for (name, ratio) in [("map", worst(sizes, map_ratio)), ("unmap", worst(sizes, unmap_ratio))] {
        if let Some(ratio) = ratio {
            result.set_figure(&format!("{name}_ratio_to_raw"), ratio);
        }
    }
    for times in sizes {
        fill_size(result, times);
    }
    for times in layouts {
        fill_layout(result, times);
    }
    if let Some([page_id, per_gib]) = slab_speedup(layouts) {
        result.set_figure("speedup_slab_over_per_layer.page_id", page_id);
        result.set_figure("speedup_slab_over_per_layer.per_gib", per_gib);
    }
    if let Some(threads) = threads {
        result.set_figure("threads.one_pages_per_s", threads.one_pages_per_s);
        result.set_figure("threads.all_pages_per_s", threads.all_pages_per_s);
    }
}

fn fill_size(result: &mut BenchResult, times: &PageSizeTimes) {
    let key = size_key(times.page_bytes);
    let sides = [("", &times.ours), ("raw_", &times.raw)];
    for (prefix, side) in sides {
        for (name, samples) in [("map", &side.map), ("unmap", &side.unmap)] {
            result.add_times(format!("{key}.{prefix}{name}"), samples);
            set_p50(result, &format!("page_sizes.{key}.{prefix}{name}_us_p50"), samples, 1e3);
        }
    }
    for (call, samples) in &times.calls {
        result.add_times(format!("{key}.call.{call}"), samples);
        set_p50(result, &format!("page_sizes.{key}.calls.{call}_us_p50"), samples, 1e3);
    }
    for (name, ratio) in [("map", map_ratio(times)), ("unmap", unmap_ratio(times))] {
        if let Some(ratio) = ratio {
            result.set_figure(&format!("page_sizes.{key}.{name}_ratio_to_raw"), ratio);
        }
    }
}

fn fill_layout(result: &mut BenchResult, times: &LayoutTimes) {
    let name = times.geometry.layout().name();
    let key = |figure: &str| format!("layouts.{name}.{figure}");
    result.add_times(format!("{name}.map_page"), &times.page.map);
    result.add_times(format!("{name}.unmap_page"), &times.page.unmap);
    result.add_times(format!("{name}.init"), &times.init);
    set_p50(result, &key("map_page_us_p50"), &times.page.map, 1e3);
    set_p50(result, &key("unmap_page_us_p50"), &times.page.unmap, 1e3);
    if let Some(ns) = ns_per_gib(times) {
        result.set_figure(&key("map_us_per_gib"), ns / 1e3);
    }
    result.set_figure(&key("driver_calls_per_page"), times.calls_per_page);
    result.set_figure(&key("handles_per_page"), f64::from(times.geometry.placement().handles_per_page()));
    result.set_figure(&key("page_bytes"), to_f64(times.geometry.page_bytes().0));
    set_p50(result, &key("init_ms"), &times.init, 1e6);
}

/// The tables for people.
pub(super) fn tables(
    capabilities: &Capabilities,
    plan: &Plan,
    sizes: &[PageSizeTimes],
    threads: Option<&ThreadRates>,
    layouts: &[LayoutTimes],
) -> String {
    let driver = capabilities.driver.as_ref().map_or(String::new(), |driver| format!(", driver {driver}"));
    let mut text = format!(
        "{} back-end: {}{driver}, granularity {}\n",
        capabilities.name, capabilities.device, capabilities.granularity
    );
    for times in sizes {
        text += &size_table(times);
    }
    if let Some(threads) = threads {
        text += &format!(
            "\n{} threads, pages of {}: {} pages/s against {} of one thread (x{})\n",
            threads.threads,
            threads.page_bytes,
            format_figure(threads.all_pages_per_s),
            format_figure(threads.one_pages_per_s),
            format_figure(threads.all_pages_per_s / threads.one_pages_per_s)
        );
    }
    text + &layout_table(plan, layouts)
}

fn size_table(times: &PageSizeTimes) -> String {
    let rows = times.calls.iter().map(|(call, samples)| (format!("raw {call}"), samples)).chain([
        ("raw map, all calls".to_owned(), &times.raw.map),
        ("our map".to_owned(), &times.ours.map),
        ("raw unmap, all calls".to_owned(), &times.raw.unmap),
        ("our unmap".to_owned(), &times.ours.unmap),
    ]);
    let rows: Vec<_> = rows.filter_map(|(name, samples)| Some((name, samples.percentiles()?))).collect();
    let table = latency_table(rows.iter().map(|(name, percentiles)| (name.as_str(), *percentiles)));
    let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
    format!(
        "\npages of {} (ours / raw: map {}, unmap {})\n{}",
        times.page_bytes,
        ratio(map_ratio(times)),
        ratio(unmap_ratio(times)),
        table.render()
    )
}

fn layout_table(plan: &Plan, layouts: &[LayoutTimes]) -> String {
    let header = ["layout", "page id", "handles", "calls", "map p50", "unmap p50", "map per GiB", "reserve all"];
    let mut table = Table::new(&header);
    for times in layouts {
        let p50 = |samples: &Samples| samples.percentiles().map_or("-".to_owned(), |p| format_ns(to_f64(p.p50)));
        table.row(&[
            times.geometry.layout().name().to_owned(),
            times.geometry.page_bytes().to_string(),
            times.geometry.placement().handles_per_page().to_string(),
            format_figure(times.calls_per_page),
            p50(&times.page.map),
            p50(&times.page.unmap),
            ns_per_gib(times).map_or("-".to_owned(), format_ns),
            p50(&times.init),
        ]);
    }
    let mut text = format!(
        "\none page id of a model with {} layers (K and V, blocks of {} tokens)\n{}",
        plan.layers,
        plan.block_size,
        table.render()
    );
    if let Some([page_id, per_gib]) = slab_speedup(layouts) {
        text += &format!(
            "slab maps a page id x{} and a GiB x{} as fast as per-layer\n",
            format_figure(page_id),
            format_figure(per_gib)
        );
    }
    text
}

fn map_ratio(times: &PageSizeTimes) -> Option<f64> {
    median_ratio(&times.ours.map, &times.raw.map)
}

fn unmap_ratio(times: &PageSizeTimes) -> Option<f64> {
    median_ratio(&times.ours.unmap, &times.raw.unmap)
}

fn worst(sizes: &[PageSizeTimes], ratio: fn(&PageSizeTimes) -> Option<f64>) -> Option<f64> {
    sizes.iter().filter_map(ratio).reduce(f64::max)
}

/// Per page id and per GiB, where both layouts were measured.
fn slab_speedup(layouts: &[LayoutTimes]) -> Option<[f64; 2]> {
    let find = |layout| layouts.iter().find(|times| times.geometry.layout() == layout);
    let (slab, per_layer) = (find(Layout::Slab)?, find(Layout::PerLayer)?);
    Some([median_ratio(&per_layer.page.map, &slab.page.map)?, ns_per_gib(per_layer)? / ns_per_gib(slab)?])
}

fn ns_per_gib(times: &LayoutTimes) -> Option<f64> {
    Some(to_f64(times.page.map.percentiles()?.p50) / times.geometry.page_bytes().as_gib())
}

fn set_p50(result: &mut BenchResult, path: &str, samples: &Samples, ns_per_unit: f64) {
    if let Some(percentiles) = samples.percentiles() {
        result.set_figure(path, to_f64(percentiles.p50) / ns_per_unit);
    }
}

/// `2MiB`: a key without spaces.
fn size_key(bytes: Bytes) -> String {
    bytes.to_string().replace(' ', "")
}
