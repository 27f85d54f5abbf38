-- How Argo CD sees an object of our kinds: as kstatus does.
local status = obj.status or {}
if status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not looked at this spec yet" }
end

local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end
local function is_true(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end

local message = ""
if conditions.Ready ~= nil then
  message = conditions.Ready.reason .. ": " .. conditions.Ready.message
end
if is_true("Stalled") then
  return { status = "Degraded", message = message }
end
if is_true("Ready") and not is_true("Reconciling") then
  return { status = "Healthy", message = message }
end
return { status = "Progressing", message = message }
