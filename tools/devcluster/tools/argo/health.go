package main

import (
	"github.com/argoproj/gitops-engine/pkg/health"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"specdecode.io/devcluster/tools/lua"
)

// Health checks in Lua, by kind: what `resource.customizations.health` of Argo CD's ConfigMap holds.
type checks map[string]string

func (scripts checks) GetResourceHealth(object *unstructured.Unstructured) (*health.HealthStatus, error) {
	script, known := scripts[object.GetKind()]
	if !known {
		return nil, nil
	}
	said, err := lua.Judge(script, object.Object)
	if err != nil {
		return nil, err
	}
	return &health.HealthStatus{Status: health.HealthStatusCode(said.Status), Message: said.Message}, nil
}
