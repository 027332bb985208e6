"""Reports: figures as text, and pages as one HTML file each, with inline SVG, light and dark, for a desk and a phone.
frame       the page: style, sections, tables, legends
svg         what charts share: a drawing area, scales, axes, labels
charts      stacked bars, a scatter with its front, stacked areas over time, lanes of a pipeline
plan_page, simulation_page    what a verb found out, as a page
"""
