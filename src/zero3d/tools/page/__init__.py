"""Reports: what `zero3d plan` says, and pages as one HTML file each, without a network or a script.

plan_text   what `zero3d plan` says; explain_text: of one plan; plan_json: as numbers
markup      text that is safe in a page; tags
frame       the page: style, light and dark, for a desk and a phone; sections, tables, legends
paint       how each class of a drawing is painted: by attributes, and by the style of a page
svg         what charts share: a drawing area, scales, axes, labels
charts      stacked bars, bars with whiskers, a scatter with its front, stacked areas over time, lanes of a pipeline
curves      curves over steps, with marks at steps
plan_page, simulation_page    what a verb found out, as a page
"""
